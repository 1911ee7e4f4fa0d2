// Fails each fallible call of a device, one after the other, under work that uses all of them, and checks
// that nothing is left behind whichever failed.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "runtime/copy_engine.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

constexpr Bytes kSize = 64_KiB;

// What follows is what callers do: each takes, uses and gives back, and ends early where a call fails.

void move_both_ways(Device& device, Address hbm) {
  auto engine = CopyEngine::create(device);
  if (!engine.ok()) return;
  std::vector<std::byte> host(kSize.count());
  if (!device.pin(host.data(), kSize).ok()) return;
  {
    const std::array down = {Transfer{.to = host.data(), .from = hbm, .size = kSize}};
    const std::array up = {Transfer{.to = hbm, .from = host.data(), .size = kSize}};
    const auto spilled =
        (*engine)->submit({.direction = Direction::kD2H, .reason = CopyReason::kSpill}, down);
    if (spilled.ok()) {
      EXPECT_TRUE(spilled->synchronize().ok());
      const auto restored =
          (*engine)->submit({.direction = Direction::kH2D, .reason = CopyReason::kRestore}, up);
      EXPECT_TRUE(!restored.ok() || restored->synchronize().ok());
    }
  }
  device.unpin(host.data(), kSize);
}

void use_stream(Device& device, Address hbm) {
  const auto stream = device.create_stream(StreamPriority::kNormal);
  if (!stream.ok()) return;
  if (const auto event = device.create_event(); event.ok()) {
    bool ran = false;
    const bool all = device.fill(*stream, hbm, 1, kSize).ok() &&
                     device.launch_host(*stream, [&ran] { ran = true; }).ok() &&
                     device.record(*stream, *event).ok() && device.wait(*stream, *event).ok();
    EXPECT_TRUE(device.synchronize(*stream).ok()) << "a call that failed has queued nothing";
    EXPECT_TRUE(ran || !all);
    device.destroy_event(*event);
  }
  device.destroy_stream(*stream);
}

void churn(Device& device) {
  const auto address = device.reserve(kSize);
  if (!address.ok()) return;
  if (const auto physical = device.create_physical(kSize); physical.ok()) {
    if (device.map(*address, *physical, kSize).ok()) {
      use_stream(device, *address);
      move_both_ways(device, *address);
      // A failed unmap has changed nothing: the second try must find the mapping still there.
      EXPECT_TRUE(device.unmap(*address, kSize).ok() || device.unmap(*address, kSize).ok());
    }
    device.destroy_physical(*physical);
  }
  device.release(*address, kSize);
}

void expect_nothing_live(const EmulatedDevice& device, std::uint64_t nth) {
  EXPECT_EQ(device.live_physical(), 0_B) << "after failing call " << nth;
  EXPECT_EQ(device.reserved_bytes(), 0_B) << "after failing call " << nth;
  EXPECT_EQ(device.mapped_bytes(), 0_B) << "after failing call " << nth;
  EXPECT_EQ(device.pinned_bytes(), 0_B) << "after failing call " << nth;
  EXPECT_EQ(device.live_streams(), 0) << "after failing call " << nth;
  EXPECT_EQ(device.live_events(), 0) << "after failing call " << nth;
}

TEST(DeviceFaults, NothingLeaksWhicheverCallFails) {
  const auto device = EmulatedDevice::create({.capacity = 1_MiB, .granularity = kSize}).value();
  std::uint64_t nth = 1;
  for (;; ++nth) {
    const ScopedFaults faults(fail_call(nth));
    churn(*device);
    expect_nothing_live(*device, nth);
    if (!faults.fired()) break;
  }
  EXPECT_GT(nth, 20U) << "the churn reaches the device's calls";
}

TEST(DeviceFaults, EveryPointOfTheDeviceIsAsked) {
  const auto device = EmulatedDevice::create({.capacity = 1_MiB, .granularity = kSize}).value();
  for (auto point = FaultPoint::kDeviceReserve; point <= FaultPoint::kDeviceLaunch;
       point = static_cast<FaultPoint>(static_cast<int>(point) + 1)) {
    const ScopedFaults faults(fail_call(point, 1));
    churn(*device);
    EXPECT_TRUE(faults.fired()) << name_of(point);
  }
}

}  // namespace
}  // namespace terrace
