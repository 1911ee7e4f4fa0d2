// Recomputation, caching and budgets change where bytes are and never what they say.
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

constexpr int kSteps = 5;

Rig::Options tiny(Recompute recompute, SwapMode swapcore) {
  Rig::Options options;
  options.config = tiny_config();
  options.config.train.recompute = recompute;
  options.swapcore = swapcore;
  return options;
}

// Peak of the bytes in blocks after two steps.
Bytes live_peak(const Rig::Options& options) {
  Rig rig(options);
  (void)rig.steps(2);
  return rig.session().hbm_usage().live_peak;
}

TEST(Recompute, GivesTheBitsOfKeptActivations) {
  Rig kept(tiny(Recompute::kNone, SwapMode::kOff));
  Rig recomputed(tiny(Recompute::kFull, SwapMode::kOff));
  const auto losses = kept.steps(kSteps);
  EXPECT_EQ(recomputed.steps(kSteps), losses);
  EXPECT_LT(losses.back(), losses.front());
  EXPECT_EQ(recomputed.session().counters().hits, 0U);
}

// Which slots are dropped is part of the decision that recomputation replays.
TEST(Recompute, GivesTheBitsOfKeptActivationsWhereSlotsAreDropped) {
  Rig exact(tiny(Recompute::kNone, SwapMode::kOff));
  Rig::Options options = tiny(Recompute::kNone, SwapMode::kOff);
  options.config.moe.capacity = 0.5;
  Rig kept(options);
  options.config.train.recompute = Recompute::kFull;
  Rig recomputed(options);
  options.swapcore = SwapMode::kAuto;
  Rig cached(options);
  const auto losses = kept.steps(kSteps);
  EXPECT_EQ(recomputed.steps(kSteps), losses);
  EXPECT_EQ(cached.steps(kSteps), losses);
  EXPECT_NE(exact.steps(kSteps), losses);
}

// Room for every slot: the exact model, to the bit.
TEST(Capacity, ThatNoExpertExceedsChangesNothing) {
  Rig::Options options = tiny(Recompute::kNone, SwapMode::kOff);
  Rig exact(options);
  options.config.moe.capacity = static_cast<double>(options.config.moe.experts);
  Rig roomy(options);
  EXPECT_EQ(roomy.steps(kSteps), exact.steps(kSteps));
}

TEST(Recompute, GivesTheSameBitsTwice) {
  Rig first(tiny(Recompute::kNone, SwapMode::kOff));
  Rig second(tiny(Recompute::kNone, SwapMode::kOff));
  EXPECT_EQ(first.steps(kSteps), second.steps(kSteps));
}

TEST(Recompute, TakesLessMemory) {
  EXPECT_LT(live_peak(tiny(Recompute::kFull, SwapMode::kOff)),
            live_peak(tiny(Recompute::kNone, SwapMode::kOff)));
}

TEST(SwapCore, GivesTheBitsOfRecomputation) {
  Rig off(tiny(Recompute::kFull, SwapMode::kOff));
  Rig on(tiny(Recompute::kFull, SwapMode::kAuto));
  EXPECT_EQ(on.steps(kSteps), off.steps(kSteps));
  EXPECT_GT(on.session().counters().hits, 0U);
}

// Forward is exact: only what backward reads is near instead of equal.
TEST(SwapCore, Fp8SpillsChangeLossesALittleAndExactOnesNotAtAll) {
  Rig::Options options = tiny(Recompute::kFull, SwapMode::kOff);
  Rig off(options);
  const auto losses = off.steps(kSteps);
  options.swapcore = SwapMode::kRules;
  options.rules = {{.match = "*", .kind = {}, .action = RuleAction::kDdr}};
  Rig exact(options);
  EXPECT_EQ(exact.steps(kSteps), losses);
  options.spill_format = SpillFormat::kFp8;
  Rig packed(options);
  const auto near = packed.steps(kSteps);
  EXPECT_EQ(near[0], losses[0]);
  EXPECT_NE(near, losses);
  for (std::size_t i = 0; i < near.size(); ++i) EXPECT_NEAR(near[i], losses[i], 0.01F * losses[i]) << i;
  const SessionCounters counters = packed.session().counters();
  EXPECT_GT(counters.hits + counters.late, 0U);
  EXPECT_LT(counters.spilled.count() * 3, exact.session().counters().spilled.count());
  EXPECT_GT(counters.spill_error_mean, 0);
  EXPECT_LE(counters.spill_error_largest, 1.0 / 16);
  EXPECT_EQ(exact.session().counters().spill_error_largest, 0);
}

TEST(SwapCore, StaysWithinATightBudgetAndGivesTheSameBits) {
  Rig::Options options = tiny(Recompute::kFull, SwapMode::kOff);
  Rig plain(options);
  const auto losses = plain.steps(kSteps);
  const Bytes recomputed = plain.session().hbm_usage().mapped_peak;
  options.swapcore = SwapMode::kAuto;
  options.budget = recomputed + 512_KiB;
  Rig tight(options);
  EXPECT_EQ(tight.steps(kSteps), losses);
  EXPECT_LE(tight.session().hbm_usage().mapped_peak, options.budget);
}

TEST(Budget, TooSmallIsAnErrorThatSaysWhatWasMissing) {
  Rig::Options options = tiny(Recompute::kNone, SwapMode::kOff);
  Bytes needed;
  {
    Rig rig(options);
    (void)rig.steps(1);
    needed = rig.session().hbm_usage().mapped_peak;
  }
  options.budget = needed / 2;
  try {
    Rig rig(options);
    (void)rig.steps(1);
    FAIL() << "a budget of half the need was enough";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kOutOfMemory);
    EXPECT_GT(error.error().bytes, 0_B);
    EXPECT_NE(std::string(error.what()).find("budget"), std::string::npos) << error.what();
  }
}

TEST(Budget, LargerThanTheDeviceIsRefused) {
  Rig::Options options;
  options.budget = options.capacity + 1_MiB;
  EXPECT_NE(failure_of([&] { Rig rig(options); }).find("budget"), std::string::npos);
}

}  // namespace
}  // namespace terrace::trainer::test
