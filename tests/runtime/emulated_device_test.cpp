#include "runtime/emulated/emulated_device.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace terrace {
namespace {

constexpr Bytes kChunk = 64_KiB;

std::unique_ptr<EmulatedDevice> open(EmulatedOptions options = {}) {
  auto device = EmulatedDevice::create(options);
  EXPECT_TRUE(device.ok());
  return std::move(device).value();
}

void expect_nothing_live(const EmulatedDevice& device) {
  EXPECT_EQ(device.live_physical(), 0_B);
  EXPECT_EQ(device.reserved_bytes(), 0_B);
  EXPECT_EQ(device.mapped_bytes(), 0_B);
  EXPECT_EQ(device.pinned_bytes(), 0_B);
  EXPECT_EQ(device.live_streams(), 0);
  EXPECT_EQ(device.live_events(), 0);
}

// A reserved range with memory under it, given back at the end.
class Backed {
 public:
  Backed(Device& device, Bytes size)
      : device_(device),
        size_(size),
        address_(device.reserve(size).value()),
        physical_(device.create_physical(size).value()) {
    EXPECT_TRUE(device_.map(address_, physical_, size_).ok());
  }
  ~Backed() {
    EXPECT_TRUE(device_.unmap(address_, size_).ok());
    device_.destroy_physical(physical_);
    device_.release(address_, size_);
  }
  Backed(const Backed&) = delete;
  Backed& operator=(const Backed&) = delete;
  [[nodiscard]] Address at() const { return address_; }

 private:
  Device& device_;
  Bytes size_;
  Address address_;
  Physical physical_;
};

// Holds a stream until opened: work queued behind it has certainly not run yet.
class Gate {
 public:
  Gate(Device& device, Stream stream) {
    EXPECT_TRUE(device.launch_host(stream, [opened = opened_.get_future().share()] { opened.wait(); }).ok());
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

TEST(EmulatedDevice, SaysWhatItIs) {
  const auto device = open({.capacity = 1_MiB + 1_B, .granularity = kChunk});
  EXPECT_EQ(device->info().kind, "emulated");
  EXPECT_EQ(device->info().capacity, 1_MiB) << "whole granules only";
  EXPECT_TRUE(device->info().can.remap);
  EXPECT_TRUE(device->info().can.host_addressable);
  EXPECT_TRUE(device->info().can.host_kernels);
  EXPECT_EQ(device->memory()->free, 1_MiB);
}

TEST(EmulatedDevice, RefusesOptionsThatMakeNoDevice) {
  EXPECT_FALSE(EmulatedDevice::create({.granularity = 100_KiB}).ok());
  EXPECT_FALSE(EmulatedDevice::create({.granularity = 1_KiB}).ok());
  EXPECT_FALSE(EmulatedDevice::create({.capacity = 1_KiB}).ok());
  EXPECT_FALSE(EmulatedDevice::create({.h2d_bytes_per_second = 0}).ok());
  EXPECT_FALSE(EmulatedDevice::create({.d2h_bytes_per_second = -1}).ok());
}

TEST(EmulatedDevice, OpensByKind) {
  EXPECT_EQ((*open_device("emulated", {}))->info().kind, "emulated");
  EXPECT_EQ((*open_device("auto", {}))->info().kind, cuda_available() ? "cuda" : "emulated");
  const auto unknown = open_device("tpu", {});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, Errc::kInvalidArgument);
}

TEST(EmulatedDevice, HasNoNativeStreamsToAdopt) {
  auto device = open_emulated_device({});
  ASSERT_TRUE(device.ok());
  EXPECT_EQ((*device)->adopt_stream(nullptr).error().code, Errc::kNotSupported);
}

TEST(EmulatedDevice, CapacityIsAWallAndHolesAreNot) {
  const auto device = open({.capacity = 4 * kChunk, .granularity = kChunk});
  std::vector<Physical> pieces;
  for (int i = 0; i < 4; ++i) pieces.push_back(*device->create_physical(kChunk));
  const auto refused = device->create_physical(kChunk);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kOutOfMemory);
  EXPECT_EQ(refused.error().bytes, kChunk);
  EXPECT_EQ(device->memory()->free, 0_B);

  device->destroy_physical(pieces[0]);
  device->destroy_physical(pieces[2]);
  EXPECT_FALSE(device->create_physical(3 * kChunk).ok());
  const auto split = device->create_physical(2 * kChunk);
  ASSERT_TRUE(split.ok()) << "two free granules serve a request for two, wherever they lie";
  device->destroy_physical(*split);
  device->destroy_physical(pieces[1]);
  device->destroy_physical(pieces[3]);
  expect_nothing_live(*device);
  const auto whole = device->create_physical(4 * kChunk);
  ASSERT_TRUE(whole.ok());
  device->destroy_physical(*whole);
}

TEST(EmulatedDevice, FreshMemoryIsZero) {
  const auto device = open({.capacity = kChunk, .granularity = kChunk});
  for (int round = 0; round < 2; ++round) {
    const Backed block(*device, kChunk);
    EXPECT_EQ(block.at()[0], std::byte{0});
    EXPECT_EQ(block.at()[kChunk.count() - 1], std::byte{0});
    std::memset(block.at(), 0xAB, kChunk.count());
  }
}

TEST(EmulatedDevice, RemapKeepsTheAddressAndTheBytes) {
  const auto device = open({.capacity = 1_MiB, .granularity = kChunk});
  const Address at = *device->reserve(2 * kChunk);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % kChunk.count(), 0U);
  const Physical first = *device->create_physical(kChunk);
  const Physical second = *device->create_physical(kChunk);

  ASSERT_TRUE(device->map(at, first, kChunk).ok());
  std::memset(at, 1, kChunk.count());
  ASSERT_TRUE(device->unmap(at, kChunk).ok());
  ASSERT_TRUE(device->map(at, second, kChunk).ok());
  EXPECT_EQ(at[0], std::byte{0}) << "other memory under the same address";
  std::memset(at, 2, kChunk.count());
  ASSERT_TRUE(device->unmap(at, kChunk).ok());

  ASSERT_TRUE(device->map(at, second, kChunk).ok());
  ASSERT_TRUE(device->map(at + kChunk.count(), first, kChunk).ok());
  EXPECT_EQ(at[0], std::byte{2});
  EXPECT_EQ(at[kChunk.count()], std::byte{1}) << "the bytes went with the physical memory";
  ASSERT_TRUE(device->unmap(at, 2 * kChunk).ok()) << "one call may take several whole mappings";
  device->destroy_physical(first);
  device->destroy_physical(second);
  device->release(at, 2 * kChunk);
  expect_nothing_live(*device);
}

TEST(EmulatedDevice, RefusesMapsThatADriverWouldRefuse) {
  const auto device = open({.capacity = 1_MiB, .granularity = kChunk});
  const Address at = *device->reserve(2 * kChunk);
  const Physical small = *device->create_physical(kChunk);
  const Physical large = *device->create_physical(2 * kChunk);
  EXPECT_FALSE(device->reserve(kChunk + 1_B).ok());
  EXPECT_FALSE(device->create_physical(0_B).ok());
  EXPECT_FALSE(device->map(at, large, kChunk).ok()) << "mapped whole or not at all";
  EXPECT_FALSE(device->map(at + kChunk.count(), large, 2 * kChunk).ok()) << "past the reservation";
  EXPECT_FALSE(device->map(at + 1, small, kChunk).ok());
  EXPECT_FALSE(device->map(at, Physical{.id = 99}, kChunk).ok());
  ASSERT_TRUE(device->map(at + kChunk.count(), small, kChunk).ok());
  EXPECT_FALSE(device->map(at, large, 2 * kChunk).ok()) << "part of it is mapped";
  EXPECT_FALSE(device->unmap(at, 2 * kChunk).ok()) << "part of it is not mapped";
  EXPECT_FALSE(device->unmap(at, kChunk).ok());
  ASSERT_TRUE(device->unmap(at + kChunk.count(), kChunk).ok());
  device->destroy_physical(small);
  device->destroy_physical(large);
  device->release(at, 2 * kChunk);
}

TEST(EmulatedDeviceDeathTest, AnAccessThroughAGapFaults) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto device = open();
  const Address at = *device->reserve(kChunk);
  const Physical physical = *device->create_physical(kChunk);
  EXPECT_DEATH(static_cast<volatile std::byte*>(at)[0] = std::byte{1}, "");
  ASSERT_TRUE(device->map(at, physical, kChunk).ok());
  at[0] = std::byte{1};
  ASSERT_TRUE(device->unmap(at, kChunk).ok());
  EXPECT_DEATH(static_cast<volatile std::byte*>(at)[0] = std::byte{1}, "");
  device->destroy_physical(physical);
  device->release(at, kChunk);
}

TEST(EmulatedDeviceDeathTest, GivingBackWhatIsNotHeldIsAProgrammerError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto device = open();
  std::vector<std::byte> host(4096);
  EXPECT_DEATH(device->unpin(host.data(), Bytes(host.size())), "unpin takes what was pinned");
  EXPECT_DEATH(device->destroy_physical(Physical{.id = 7}), "destroyed once");
  EXPECT_DEATH((void)device->synchronize(Stream{}), "between create_stream and destroy_stream");
  const Event event = *device->create_event();
  device->destroy_event(event);
  EXPECT_DEATH((void)device->completed(event), "between create_event and destroy_event");
}

TEST(EmulatedDevice, PinsARangeOnce) {
  const auto device = open();
  std::vector<std::byte> host(8192);
  ASSERT_TRUE(device->pin(host.data(), 8192_B).ok());
  EXPECT_EQ(device->pinned_bytes(), 8192_B);
  EXPECT_FALSE(device->pin(host.data() + 4096, 4096_B).ok());
  EXPECT_FALSE(device->pin(nullptr, 4096_B).ok());
  device->unpin(host.data(), 8192_B);
  ASSERT_TRUE(device->pin(host.data() + 4096, 4096_B).ok());
  device->unpin(host.data() + 4096, 4096_B);
  expect_nothing_live(*device);
}

TEST(EmulatedDevice, AStreamRunsInOrderAndTheHostDoesNotWait) {
  const auto device = open();
  const Stream stream = *device->create_stream(StreamPriority::kNormal);
  Gate gate(*device, stream);
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(device->launch_host(stream, [&order, i] { order.push_back(i); }).ok());
  }
  const Event event = *device->create_event();
  EXPECT_TRUE(device->completed(event)) << "completed until first recorded";
  EXPECT_TRUE(device->synchronize(event).ok());
  ASSERT_TRUE(device->record(stream, event).ok());
  EXPECT_FALSE(device->completed(event));
  EXPECT_FALSE(device->seconds_between(event, event).ok());
  gate.open();
  ASSERT_TRUE(device->synchronize(event).ok());
  EXPECT_TRUE(device->completed(event));
  ASSERT_EQ(order.size(), 100U);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  device->destroy_event(event);
  device->destroy_stream(stream);
  expect_nothing_live(*device);
}

TEST(EmulatedDevice, CopiesAndFillsMoveBytesThroughTheDevice) {
  const auto device = open({.capacity = 16_MiB, .granularity = kChunk});
  const Stream stream = *device->create_stream(StreamPriority::kNormal);
  constexpr Bytes kSize = 3_MiB;  // several pieces of the link
  {
    const Backed one(*device, kSize);
    const Backed two(*device, kSize);
    std::vector<std::byte> sent(kSize.count());
    std::vector<std::byte> received(kSize.count());
    for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i * 31 >> 3);
    ASSERT_TRUE(device->copy(stream, Direction::kH2D, one.at(), sent.data(), kSize).ok());
    ASSERT_TRUE(device->copy(stream, Direction::kD2D, two.at(), one.at(), kSize).ok());
    ASSERT_TRUE(device->fill(stream, one.at(), 0x5A, kSize).ok());
    ASSERT_TRUE(device->copy(stream, Direction::kD2H, received.data(), two.at(), kSize).ok());
    ASSERT_TRUE(device->copy(stream, Direction::kD2H, received.data(), two.at(), 0_B).ok());
    ASSERT_TRUE(device->synchronize(stream).ok());
    EXPECT_EQ(received, sent);
    EXPECT_EQ(one.at()[kSize.count() - 1], std::byte{0x5A});
  }
  device->destroy_stream(stream);
}

TEST(EmulatedDevice, WaitTakesTheRecordingThatIsCurrentAtTheCall) {
  const auto device = open();
  const Stream first = *device->create_stream(StreamPriority::kNormal);
  const Stream second = *device->create_stream(StreamPriority::kHigh);
  const Event event = *device->create_event();
  std::atomic<int> value{0};

  Gate gate(*device, first);
  ASSERT_TRUE(device->launch_host(first, [&] { value = 1; }).ok());
  ASSERT_TRUE(device->record(first, event).ok());
  ASSERT_TRUE(device->wait(second, event).ok());
  int seen = -1;
  ASSERT_TRUE(device->launch_host(second, [&] { seen = value; }).ok());
  // Recorded again behind work that is held: the wait above is for the first recording alone.
  Gate later(*device, first);
  ASSERT_TRUE(device->record(first, event).ok());
  gate.open();
  ASSERT_TRUE(device->synchronize(second).ok());
  EXPECT_EQ(seen, 1);
  EXPECT_FALSE(device->completed(event));
  later.open();
  ASSERT_TRUE(device->synchronize(event).ok());
  device->destroy_event(event);
  device->destroy_stream(first);
  device->destroy_stream(second);
}

TEST(EmulatedDevice, EventsMeasureFromOneToTheOther) {
  // At 64 MiB a second a copy of 1 MiB takes 1/64 s at least: a lower bound the link promises at any load.
  const auto device =
      open({.capacity = 16_MiB, .granularity = kChunk, .h2d_bytes_per_second = 64.0 * (1 << 20)});
  const Stream stream = *device->create_stream(StreamPriority::kNormal);
  const Event from = *device->create_event();
  const Event to = *device->create_event();
  {
    const Backed block(*device, 1_MiB);
    const std::vector<std::byte> host((1_MiB).count());
    ASSERT_TRUE(device->record(stream, from).ok());
    ASSERT_TRUE(device->copy(stream, Direction::kH2D, block.at(), host.data(), 1_MiB).ok());
    ASSERT_TRUE(device->record(stream, to).ok());
    ASSERT_TRUE(device->synchronize(stream).ok());
  }
  EXPECT_GE(*device->seconds_between(from, to), 1.0 / 64);
  EXPECT_LE(*device->seconds_between(to, from), -1.0 / 64);
  device->destroy_event(from);
  device->destroy_event(to);
  device->destroy_stream(stream);
}

// Copies of one size on a stream each, released together; what the link did is read from their events.
class Race {
 public:
  static constexpr Bytes kSize = 1_MiB;

  Race(EmulatedDevice& device, std::vector<Direction> directions)
      : device_(device), hbm_(device, directions.size() * kSize), host_(directions.size() * kSize.count()) {
    const Stream starter = *device.create_stream(StreamPriority::kNormal);
    start_ = *device.create_event();
    Gate gate(device, starter);
    EXPECT_TRUE(device.record(starter, start_).ok());
    for (std::size_t i = 0; i < directions.size(); ++i) {
      streams_.push_back(*device.create_stream(StreamPriority::kNormal));
      ends_.push_back(*device.create_event());
      const Address device_side = hbm_.at() + i * kSize.count();
      const Address host_side = host_.data() + i * kSize.count();
      const bool up = directions[i] == Direction::kH2D;
      EXPECT_TRUE(device.wait(streams_[i], start_).ok());
      EXPECT_TRUE(device
                      .copy(streams_[i], directions[i], up ? device_side : host_side,
                            up ? host_side : device_side, kSize)
                      .ok());
      EXPECT_TRUE(device.record(streams_[i], ends_[i]).ok());
    }
    gate.open();
    for (const Stream stream : streams_) EXPECT_TRUE(device.synchronize(stream).ok());
    device.destroy_stream(starter);
  }
  ~Race() {
    device_.destroy_event(start_);
    for (const Event event : ends_) device_.destroy_event(event);
    for (const Stream stream : streams_) device_.destroy_stream(stream);
  }
  Race(const Race&) = delete;
  Race& operator=(const Race&) = delete;
  [[nodiscard]] double end(std::size_t copy) const { return *device_.seconds_between(start_, ends_[copy]); }

 private:
  EmulatedDevice& device_;
  Backed hbm_;
  std::vector<std::byte> host_;
  Event start_;
  std::vector<Stream> streams_;
  std::vector<Event> ends_;
};

TEST(EmulatedDevice, CopiesInOneDirectionTakeTurns) {
  // A lower bound, which holds at any load: one after the other, three copies take three times as long.
  const auto device =
      open({.capacity = 16_MiB, .granularity = kChunk, .h2d_bytes_per_second = 64.0 * (1 << 20)});
  const Race race(*device, std::vector(3, Direction::kH2D));
  EXPECT_GE(std::max({race.end(0), race.end(1), race.end(2)}), 3.0 / 64);
}

TEST(EmulatedDevice, TheOtherDirectionIsNotHeldUp) {
  // The first takes half a second of its engine; the second needs none of that.
  const auto device = open({.capacity = 16_MiB,
                            .granularity = kChunk,
                            .h2d_bytes_per_second = 2.0 * (1 << 20),
                            .d2h_bytes_per_second = 1e12});
  const Race race(*device, {Direction::kH2D, Direction::kD2H});
  EXPECT_LT(race.end(1), race.end(0));
}

TEST(EmulatedDevice, WorkThatThrowsIsReportedAndHangsNobody) {
  const auto device = open();
  const Stream first = *device->create_stream(StreamPriority::kNormal);
  const Stream second = *device->create_stream(StreamPriority::kNormal);
  const Event event = *device->create_event();
  bool ran_behind = false;
  bool ran_after = false;
  ASSERT_TRUE(device->launch_host(first, [] { throw std::runtime_error("no such expert"); }).ok());
  ASSERT_TRUE(device->launch_host(first, [&] { ran_behind = true; }).ok());
  ASSERT_TRUE(device->record(first, event).ok());
  ASSERT_TRUE(device->wait(second, event).ok());
  ASSERT_TRUE(device->launch_host(second, [&] { ran_behind = true; }).ok());
  for (const Status& status :
       {device->synchronize(event), device->synchronize(second), device->synchronize(first)}) {
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.error().text.find("no such expert"), std::string::npos);
  }
  EXPECT_FALSE(ran_behind) << "nothing runs on what failed work would have made";
  ASSERT_TRUE(device->launch_host(first, [&] { ran_after = true; }).ok());
  EXPECT_TRUE(device->synchronize(first).ok()) << "reported once";
  EXPECT_TRUE(ran_after);
  device->destroy_event(event);
  device->destroy_stream(first);
  device->destroy_stream(second);
}

TEST(EmulatedDevice, DestructionRunsWhatIsQueued) {
  int ran = 0;
  {
    const auto device = open();
    const Stream stream = *device->create_stream(StreamPriority::kNormal);
    EmulatedDevice* const inside = device.get();
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(device->launch_host(stream, [&] { ++ran; }).ok());
    ASSERT_TRUE(
        device->launch_host(stream, [&, inside] { ran += inside->fill(stream, nullptr, 0, 0_B).ok(); }).ok());
  }
  EXPECT_EQ(ran, 11);
}

TEST(EmulatedDevice, ManyThreadsUseOneDevice) {
  const auto device = open({.capacity = 64_MiB, .granularity = kChunk});
  const Stream shared = *device->create_stream(StreamPriority::kNormal);
  std::atomic<int> ran{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        const Stream own = *device->create_stream(StreamPriority::kNormal);
        const Event event = *device->create_event();
        for (int i = 0; i < 50; ++i) {
          const Backed block(*device, kChunk);
          EXPECT_TRUE(device->fill(own, block.at(), 3, kChunk).ok());
          EXPECT_TRUE(device->record(own, event).ok());
          EXPECT_TRUE(device->wait(shared, event).ok());
          EXPECT_TRUE(device->launch_host(shared, [&ran] { ++ran; }).ok());
          EXPECT_TRUE(device->synchronize(event).ok());
          EXPECT_EQ(block.at()[5], std::byte{3});
        }
        device->destroy_event(event);
        device->destroy_stream(own);
      });
    }
  }
  ASSERT_TRUE(device->synchronize(shared).ok());
  EXPECT_EQ(ran, 200);
  device->destroy_stream(shared);
  expect_nothing_live(*device);
}

}  // namespace
}  // namespace terrace
