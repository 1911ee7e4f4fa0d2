// With state and experts in DDR, whichever call of the device fails: one clean error or the numbers of a run
// in which none did, and everything is given back (the rig checks).
#include <optional>

#include "runtime/fault.hpp"
#include "tests/trainer/tiers_rig.hpp"

namespace terrace::trainer::test {
namespace {

Rig::Options all_tiers() {
  Rig::Options options = plain(Dtype::kBf16);
  options.config.model.layers = 3;
  options.config.train.recompute = Recompute::kFull;
  options.swapcore = SwapMode::kAuto;
  options.optimizer = kStateInDdr;
  options.experts = streamed(0.3);
  return options;
}

std::optional<Numbers> numbers_or_error(const Rig::Options& options) {
  try {
    Rig rig(options);
    return numbers_of(rig, 2);
  } catch (const std::exception& error) {
    EXPECT_FALSE(std::string(error.what()).empty());
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return std::nullopt;
  }
}

void end_cleanly_or_change_nothing(const Rig::Options& options) {
  const auto expected = numbers_or_error(options);
  ASSERT_TRUE(expected);
  bool fired = true;
  for (std::uint64_t nth = 1; fired; nth += 1 + nth / 4) {
    const ScopedFaults faults(fail_call(nth));
    const auto numbers = numbers_or_error(options);
    fired = faults.fired();
    if (numbers) {
      EXPECT_TRUE(*numbers == *expected) << "after failing call " << nth;
    }
  }
  for (const FaultPoint point : {FaultPoint::kDeviceCopy, FaultPoint::kDeviceWait, FaultPoint::kDeviceRecord,
                                 FaultPoint::kDevicePin, FaultPoint::kHostMap}) {
    fired = true;
    for (std::uint64_t nth = 1; fired; nth += 1 + nth / 3) {
      const ScopedFaults faults(fail_call(point, nth));
      const auto numbers = numbers_or_error(options);
      fired = faults.fired();
      if (numbers) {
        EXPECT_TRUE(*numbers == *expected) << "after failing " << name_of(point) << " call " << nth;
      }
    }
  }
}

TEST(Tiers, EndCleanlyOrChangeNothing) { end_cleanly_or_change_nothing(all_tiers()); }

TEST(Tiers, ByRouterWithGradientsInDdrToo) {
  Rig::Options options = all_tiers();
  options.optimizer = kGradientsInDdr;
  options.experts.load = ExpertLoad::kRouter;
  end_cleanly_or_change_nothing(options);
}

// Somebody stops it in the middle: with copies under way everything is given back (the rig checks).
TEST(Tiers, AStepThatIsNotFinishedLeavesNothing) {
  Rig::Options options = all_tiers();
  options.link_bytes_per_second = 20e6;
  Rig rig(options);
  (void)rig.steps(1);
}

}  // namespace
}  // namespace terrace::trainer::test
