// Whichever call of the device fails, a run ends with one clean error or with the losses it would have had,
// and gives everything back (the rig checks).
#include <optional>

#include "runtime/fault.hpp"
#include "tests/trainer/trainer_rig.hpp"

namespace terrace::trainer::test {
namespace {

constexpr int kSteps = 3;

Rig::Options pressed() {
  Rig::Options options;
  options.config.train.recompute = Recompute::kFull;
  options.swapcore = SwapMode::kAuto;
  return options;
}

std::optional<std::vector<float>> losses_of(const Rig::Options& options) {
  try {
    Rig rig(options);
    return rig.steps(kSteps);
  } catch (const std::exception& error) {
    EXPECT_FALSE(std::string(error.what()).empty());
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return std::nullopt;
  }
}

// Early calls one by one, later ones in growing strides: there are thousands.
std::uint64_t next(std::uint64_t nth) { return nth < 40 ? nth + 1 : nth + nth / 4; }

TEST(TrainerFaults, EndCleanlyOrChangeNothing) {
  const auto expected = losses_of(pressed());
  ASSERT_TRUE(expected);
  bool fired = true;
  for (std::uint64_t nth = 1; fired; nth = next(nth)) {
    const ScopedFaults faults(fail_call(nth));
    const auto losses = losses_of(pressed());
    fired = faults.fired();
    if (losses) {
      EXPECT_EQ(*losses, *expected) << "after failing call " << nth;
    }
  }
}

TEST(TrainerFaults, AllocationsFailCleanly) {
  const auto expected = losses_of(pressed());
  ASSERT_TRUE(expected);
  for (const FaultPoint point : {FaultPoint::kDeviceCreatePhysical, FaultPoint::kDeviceMap,
                                 FaultPoint::kDeviceCopy, FaultPoint::kDevicePin, FaultPoint::kHostMap}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired; nth = next(nth)) {
      const ScopedFaults faults(fail_call(point, nth));
      const auto losses = losses_of(pressed());
      fired = faults.fired();
      if (losses) {
        EXPECT_EQ(*losses, *expected) << "after failing " << name_of(point) << " call " << nth;
      }
    }
  }
}

}  // namespace
}  // namespace terrace::trainer::test
