// A space of stable addresses on an emulated device, with streams that use it.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/emulated/emulated_device.hpp"
#include "swapcore/stable/stable_space.hpp"

namespace terrace::test {

struct StableRig {
  static constexpr Bytes kBlock = 256_KiB;
  struct Options {
    Bytes hbm = 8 * kBlock;
    Bytes ddr = 64 * kBlock;
    Bytes batch = 2 * kBlock;
    int streams = 2;
    double link = 4e9;
    // What the space sees of the device; null: the device itself.
    std::function<std::unique_ptr<Device>(EmulatedDevice&)> seen_through = nullptr;
  };
  explicit StableRig(const Options& with)
      : device(std::move(EmulatedDevice::create({.capacity = 64_MiB,
                                                 .granularity = 64_KiB,
                                                 .h2d_bytes_per_second = with.link,
                                                 .d2h_bytes_per_second = with.link}))
                   .value()),
        front(with.seen_through != nullptr ? with.seen_through(*device) : nullptr),
        copies(std::move(CopyEngine::create(seen())).value()),
        users(seen()),
        lease(std::make_shared<HostLease>(with.ddr)) {
    for (int i = 0; i < with.streams; ++i) {
      streams.push_back(device->create_stream(StreamPriority::kNormal).value());
      slots.push_back(users.add(streams.back()));
    }
    auto opened = StableSpace::create(
        seen(), *copies, users,
        {.span = 64_MiB, .hbm_budget = with.hbm, .batch = with.batch, .lease = lease, .nodes = {0}});
    EXPECT_TRUE(opened.ok());
    space = std::move(*opened);
  }
  StableRig() : StableRig(Options{}) {}
  // Nothing is left on the device.
  ~StableRig() {
    for (const Stream stream : streams) EXPECT_TRUE(device->synchronize(stream).ok());
    for (const StableSpace::View& block : space->blocks()) EXPECT_TRUE(space->free(block.at).ok());
    space.reset();
    for (const Stream stream : streams) device->destroy_stream(stream);
    copies.reset();
    EXPECT_EQ(device->mapped_bytes(), 0_B);
    EXPECT_EQ(device->reserved_bytes(), 0_B);
    EXPECT_EQ(device->live_host_physical(), 0_B);
    EXPECT_EQ(lease->held(), 0_B);
  }

  // Queues `work` on a stream as a guest's launch is: known to use what the pointers lead to.
  void launch(int stream, const std::vector<const void*>& pointers, std::function<void()> work) {
    StableSpace::Uses uses(*space);
    uses.begin(pointers, slots[static_cast<std::size_t>(stream)]);
    ASSERT_TRUE(device->launch_host(streams[static_cast<std::size_t>(stream)], std::move(work)).ok());
  }
  void launch_on_everything(int stream, std::function<void()> work) {
    StableSpace::Uses uses(*space);
    uses.begin_everything(slots[static_cast<std::size_t>(stream)]);
    ASSERT_TRUE(device->launch_host(streams[static_cast<std::size_t>(stream)], std::move(work)).ok());
  }
  void move(Address at, Place place) {
    ASSERT_TRUE(space->order(at, place).ok());
    const Status moved = space->await(at);
    ASSERT_TRUE(moved.ok()) << moved.error().text;
    ASSERT_EQ(space->find(at)->place, place);
  }

  [[nodiscard]] Device& seen() { return front != nullptr ? *front : *device; }

  std::unique_ptr<EmulatedDevice> device;
  std::unique_ptr<Device> front;
  std::unique_ptr<CopyEngine> copies;
  DeviceStreams users;
  std::shared_ptr<HostLease> lease;
  std::vector<Stream> streams;
  std::vector<StreamSlot> slots;
  std::unique_ptr<StableSpace> space;
};

}  // namespace terrace::test
