// Long sequences through a narrow model: what is held grows with the length and not from step to step, and
// saved activations leave device memory where the policy says so.
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

constexpr std::int64_t kLength = 16384;

Rig::Options long_sequences(std::int64_t length) {
  Rig::Options options;
  Config& config = options.config;
  config.model = {.layers = 4, .hidden = 16, .dsa_every = 4};
  config.model.residual = ResidualKind::kAttnRes;
  config.model.residual_block = 2;
  config.kda = {.heads = 1, .head_width = 16, .conv_taps = 4, .gate_rank = 4};
  config.dsa = {
      .heads = 1, .key_width = 16, .value_width = 16, .index_heads = 1, .index_width = 8, .top_k = 16};
  config.moe = {.latent = 8, .experts = 4, .top_k = 2, .expert_width = 8, .shared_width = 16};
  config.train.batch = 1;
  config.train.length = length;
  config.train.micro_batches = 1;
  config.train.recompute = Recompute::kFull;
  options.text = sample_text(static_cast<std::size_t>(length) + 1000);
  return options;
}

struct Peaks {
  Bytes live, mapped;
};
Peaks step_peaks(Rig& rig) {
  rig.session().reset_peaks();
  (void)rig.steps(1);
  const PoolUsage usage = rig.session().hbm_usage();
  return {usage.live_peak, usage.mapped_peak};
}

TEST(LongSequences, HoldTheSameInEveryStep) {
  Rig rig(long_sequences(kLength / 2));
  const Peaks first = step_peaks(rig);
  (void)rig.steps(9);  // until the pool has met every order of blocks
  const Peaks settled = step_peaks(rig);
  EXPECT_EQ(settled.live, first.live);
  for (int step = 0; step < 2; ++step) {
    const Peaks now = step_peaks(rig);
    EXPECT_EQ(now.live, first.live);
    EXPECT_LE(now.mapped, settled.mapped);
  }
}

TEST(LongSequences, TakeBytesInProportion) {
  std::vector<double> live;
  for (const std::int64_t length : {kLength / 4, kLength / 2, kLength}) {
    Rig rig(long_sequences(length));
    live.push_back(static_cast<double>(step_peaks(rig).live.count()));
  }
  const double first = live[1] - live[0], second = live[2] - live[1];
  EXPECT_GT(first, 0);
  EXPECT_NEAR(second / first, 2, 0.02);
}

// Of three blocks of two layers. The most is held in the backward of layer 4: what layer 3 saved is coming
// back by then, what layers 0 to 2 did is still away, the input of layer 1 among it.
TEST(LongSequences, LeaveDeviceMemoryBetweenTheirUses) {
  Rig::Options options = long_sequences(kLength / 4);
  options.config.model.layers = 6;
  options.config.model.dsa_every = 6;
  Rig kept(options);
  const auto losses = kept.steps(2);
  options.checkpoint = {.budget = Amount::of(16_KiB), .contingency = Contingency::kOffload};
  Rig offloaded(options);
  EXPECT_EQ(offloaded.steps(2), losses);
  const Bytes input(static_cast<std::uint64_t>(kLength / 4 * options.config.model.hidden) * sizeof(float));
  EXPECT_LE(offloaded.session().hbm_usage().live_peak + input, kept.session().hbm_usage().live_peak);
  EXPECT_GT(offloaded.session().counters().spilled, 2 * input);
  EXPECT_EQ(kept.session().counters().spilled, 0_B);
}

}  // namespace
}  // namespace terrace::trainer::test
