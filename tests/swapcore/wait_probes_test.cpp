#include "swapcore/streamed/wait_probes.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "runtime/fault.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

TEST(WaitProbes, CountWaitsAndNotTheirAbsence) {
  Tiers tiers({});
  Device& device = *tiers.device;
  const Stream other = *device.create_stream(StreamPriority::kNormal);
  const Event done = *device.create_event();
  {
    WaitProbes probes(device);
    const auto wait = [&] { return device.wait(tiers.compute, done); };
    ASSERT_TRUE(device.launch_host(other, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }));
    ASSERT_TRUE(device.record(other, done));
    ASSERT_TRUE(probes.around(tiers.compute, wait));
    ASSERT_TRUE(device.synchronize(tiers.compute));
    EXPECT_GT(probes.collect(), 1e-3);
    EXPECT_EQ(probes.collect(), 0) << "each wait counts once";
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceWait, 1));
    EXPECT_FALSE(probes.around(tiers.compute, wait));
    EXPECT_EQ(probes.collect(), 0);
  }
  device.destroy_event(done);
  device.destroy_stream(other);
}

}  // namespace
}  // namespace terrace
