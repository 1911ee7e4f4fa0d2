// The cuda device on a real GPU: the contract of device.hpp and the copy engine on top of it. Skips, saying
// so, where there is none.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/copy_engine.hpp"
#include "runtime/device.hpp"
#include "runtime/fault.hpp"
#include "runtime/fp8_blocks.hpp"

namespace terrace {
namespace {

class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available())
      GTEST_SKIP() << "no CUDA driver with a device here: " << open_cuda_device({}).error().text;
    auto opened = open_cuda_device(DeviceId{});
    ASSERT_TRUE(opened.ok()) << opened.error().text;
    device_ = std::move(opened).value();
    auto stream = device_->create_stream(StreamPriority::kNormal);
    ASSERT_TRUE(stream.ok()) << stream.error().text;
    stream_ = *stream;
    size_ = round_up(8_MiB, device_->info().granularity);
  }
  void TearDown() override {
    if (device_ != nullptr) device_->destroy_stream(stream_);
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  Bytes size_;
};

void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.error().text; }

// A reserved range with device memory under it, given back at the end.
class Backed {
 public:
  Backed(Device& device, Bytes size) : device_(device), size_(size) {
    auto address = device.reserve(size);
    EXPECT_TRUE(address.ok()) << address.error().text;
    address_ = *address;
    auto physical = device.create_physical(size);
    EXPECT_TRUE(physical.ok()) << physical.error().text;
    physical_ = *physical;
    expect_ok(device.map(address_, physical_, size));
  }
  ~Backed() {
    expect_ok(device_.unmap(address_, size_));
    device_.destroy_physical(physical_);
    device_.release(address_, size_);
  }
  Backed(const Backed&) = delete;
  Backed& operator=(const Backed&) = delete;
  [[nodiscard]] Address at() const { return address_; }

 private:
  Device& device_;
  Bytes size_;
  Address address_ = nullptr;
  Physical physical_;
};

class Pinned {
 public:
  Pinned(Device& device, Bytes size) : device_(device), bytes_(size.count()) {
    expect_ok(device_.pin(bytes_.data(), size));
  }
  ~Pinned() { device_.unpin(bytes_.data(), Bytes(bytes_.size())); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  [[nodiscard]] std::vector<std::byte>& bytes() { return bytes_; }
  [[nodiscard]] Address at(Bytes offset = {}) { return bytes_.data() + offset.count(); }

 private:
  Device& device_;
  std::vector<std::byte> bytes_;
};

void expect_all(const std::vector<std::byte>& bytes, std::byte value) {
  for (std::size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], value) << "at byte " << i;
}

TEST_F(CudaDeviceTest, SaysWhatItIs) {
  const DeviceInfo& info = device_->info();
  EXPECT_EQ(info.kind, "cuda");
  EXPECT_FALSE(info.name.empty());
  ASSERT_EQ(info.pci.size(), std::strlen("0000:1b:00.0")) << info.pci;
  EXPECT_EQ(info.pci[4], ':');
  EXPECT_EQ(info.pci.find_first_of("ABCDEF"), std::string::npos) << info.pci;
  EXPECT_GE(info.granularity, 64_KiB);
  EXPECT_TRUE(info.can.remap);
  EXPECT_FALSE(info.can.host_addressable);
  EXPECT_FALSE(info.can.host_kernels);
  const auto memory = device_->memory();
  ASSERT_TRUE(memory.ok()) << memory.error().text;
  EXPECT_GT(memory->free, 0_B);
  EXPECT_LE(memory->free, memory->total);
  EXPECT_LE(info.capacity, memory->total);
  EXPECT_NE(device_->native_stream(stream_), nullptr);
  expect_ok(device_->bind_thread());
}

TEST_F(CudaDeviceTest, AnUnknownDeviceIsNotFound) {
  const auto unknown = open_cuda_device(DeviceId{.index = 4096});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().code, Errc::kNotFound) << unknown.error().text;
  EXPECT_NE(unknown.error().text.find("cuDeviceGet"), std::string::npos) << unknown.error().text;
}

TEST_F(CudaDeviceTest, FillsCopiesAndReadsBack) {
  const Backed one(*device_, size_);
  const Backed two(*device_, size_);
  Pinned sent(*device_, size_);
  Pinned received(*device_, size_);
  for (std::size_t i = 0; i < sent.bytes().size(); ++i) sent.bytes()[i] = static_cast<std::byte>(i * 31 >> 3);
  expect_ok(device_->copy(stream_, Direction::kH2D, one.at(), sent.at(), size_));
  expect_ok(device_->copy(stream_, Direction::kD2D, two.at(), one.at(), size_));
  expect_ok(device_->fill(stream_, one.at(), 0x5A, size_));
  expect_ok(device_->copy(stream_, Direction::kD2H, received.at(), two.at(), size_));
  expect_ok(device_->synchronize(stream_));
  EXPECT_TRUE(received.bytes() == sent.bytes());
  expect_ok(device_->copy(stream_, Direction::kD2H, received.at(), one.at(), size_));
  expect_ok(device_->copy(stream_, Direction::kD2H, received.at(), one.at(), 0_B));
  expect_ok(device_->fill(stream_, one.at(), 1, 0_B));
  expect_ok(device_->synchronize(stream_));
  expect_all(received.bytes(), std::byte{0x5A});
}

TEST_F(CudaDeviceTest, RemapKeepsTheAddress) {
  const auto address = device_->reserve(2 * size_);
  ASSERT_TRUE(address.ok()) << address.error().text;
  const Address at = *address;
  const Address beside = at + size_.count();
  const auto first = device_->create_physical(size_);
  const auto second = device_->create_physical(size_);
  ASSERT_TRUE(first.ok() && second.ok());
  Pinned host(*device_, size_);

  expect_ok(device_->map(at, *first, size_));
  expect_ok(device_->fill(stream_, at, 1, size_));
  expect_ok(device_->synchronize(stream_));
  expect_ok(device_->unmap(at, size_));
  expect_ok(device_->map(at, *second, size_));
  expect_ok(device_->fill(stream_, at, 2, size_));
  expect_ok(device_->map(beside, *first, size_));
  expect_ok(device_->copy(stream_, Direction::kD2H, host.at(), beside, size_));
  expect_ok(device_->synchronize(stream_));
  expect_all(host.bytes(), std::byte{1});
  expect_ok(device_->copy(stream_, Direction::kD2H, host.at(), at, size_));
  expect_ok(device_->synchronize(stream_));
  expect_all(host.bytes(), std::byte{2});

  expect_ok(device_->unmap(at, 2 * size_));  // several whole mappings at once
  device_->destroy_physical(*first);
  device_->destroy_physical(*second);
  device_->release(at, 2 * size_);
}

TEST_F(CudaDeviceTest, RefusesWhatCannotBeMapped) {
  const auto address = device_->reserve(size_);
  ASSERT_TRUE(address.ok()) << address.error().text;
  const auto physical = device_->create_physical(size_);
  ASSERT_TRUE(physical.ok()) << physical.error().text;
  EXPECT_FALSE(device_->reserve(size_ + 1_B).ok());
  EXPECT_FALSE(device_->create_physical(0_B).ok());
  EXPECT_FALSE(device_->map(*address, *physical, size_ - device_->info().granularity).ok());
  EXPECT_FALSE(device_->map(*address, Physical{.id = 999}, size_).ok());
  expect_ok(device_->map(*address, *physical, size_));
  EXPECT_FALSE(device_->map(*address, *physical, size_).ok()) << "mapped already";
  expect_ok(device_->unmap(*address, size_));
  device_->destroy_physical(*physical);
  device_->release(*address, size_);
}

TEST_F(CudaDeviceTest, MoreThanTheDeviceHasIsOutOfMemory) {
  const Bytes too_much = round_up(device_->memory()->total, device_->info().granularity) * 2;
  const auto refused = device_->create_physical(too_much);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kOutOfMemory) << refused.error().text;
  EXPECT_EQ(refused.error().bytes, too_much);
  EXPECT_NE(refused.error().text.find("cuMemCreate"), std::string::npos) << refused.error().text;
  const Backed still_works(*device_, size_);
  expect_ok(device_->fill(stream_, still_works.at(), 1, size_));
  expect_ok(device_->synchronize(stream_));
}

TEST_F(CudaDeviceTest, MemoryReturnsToWhereItStarted) {
  const Bytes large = round_up(512_MiB, device_->info().granularity);
  { const Backed first_use(*device_, large); }  // whatever the driver keeps for itself, it has from here on
  const Bytes before = device_->memory()->free;
  {
    const Backed block(*device_, large);
    EXPECT_LE(device_->memory()->free + large, before);
  }
  EXPECT_GE(device_->memory()->free + 64_MiB, before);
}

TEST_F(CudaDeviceTest, EventsOrderStreamsAndMeasure) {
  const auto other = device_->create_stream(StreamPriority::kHigh);
  ASSERT_TRUE(other.ok()) << other.error().text;
  std::array<Event, 3> events;
  for (Event& event : events) {
    const auto created = device_->create_event();
    ASSERT_TRUE(created.ok()) << created.error().text;
    event = *created;
    EXPECT_TRUE(device_->completed(event)) << "completed until first recorded";
    expect_ok(device_->synchronize(event));
  }
  EXPECT_FALSE(device_->seconds_between(events[0], events[1]).ok()) << "never recorded";
  {
    const Backed block(*device_, size_);
    Pinned host(*device_, size_);
    expect_ok(device_->record(stream_, events[0]));
    for (int i = 0; i < 20; ++i) expect_ok(device_->fill(stream_, block.at(), 1, size_));
    expect_ok(device_->fill(stream_, block.at(), 7, size_));
    expect_ok(device_->record(stream_, events[1]));
    expect_ok(device_->wait(*other, events[1]));
    expect_ok(device_->copy(*other, Direction::kD2H, host.at(), block.at(), size_));
    expect_ok(device_->record(*other, events[2]));
    expect_ok(device_->synchronize(events[2]));
    EXPECT_TRUE(device_->completed(events[1])) << "what events[2] waited for";
    expect_all(host.bytes(), std::byte{7});
  }
  const auto forward = device_->seconds_between(events[0], events[2]);
  const auto backward = device_->seconds_between(events[2], events[0]);
  ASSERT_TRUE(forward.ok()) << forward.error().text;
  ASSERT_TRUE(backward.ok()) << backward.error().text;
  EXPECT_GT(*forward, 0);
  EXPECT_LT(*backward, 0);
  for (const Event event : events) device_->destroy_event(event);
  device_->destroy_stream(*other);
}

// Two names for one stream of the framework's, and the default stream: what is ordered by one is by the
// other, and the stream outlives its names.
TEST_F(CudaDeviceTest, AFrameworksStreamIsNamedAndLeftAlone) {
  const Backed memory(*device_, size_);
  Pinned host(*device_, size_);
  for (void* native : {device_->native_stream(stream_), static_cast<void*>(nullptr)}) {
    const auto named = device_->adopt_stream(native);
    ASSERT_TRUE(named.ok()) << named.error().text;
    EXPECT_EQ(device_->native_stream(*named), native);
    const auto done = device_->create_event();
    ASSERT_TRUE(done.ok()) << done.error().text;
    expect_ok(device_->fill(*named, memory.at(), 0x5A, size_));
    expect_ok(device_->record(*named, *done));
    expect_ok(device_->wait(stream_, *done));
    expect_ok(device_->copy(stream_, Direction::kD2H, host.bytes().data(), memory.at(), size_));
    expect_ok(device_->synchronize(stream_));
    EXPECT_EQ(host.bytes().back(), std::byte{0x5A});
    host.bytes().assign(host.bytes().size(), std::byte{0});
    device_->destroy_event(*done);
    device_->destroy_stream(*named);
    EXPECT_FALSE(device_->alive(*named));
  }
  EXPECT_TRUE(device_->alive(stream_));
  expect_ok(device_->fill(stream_, memory.at(), 1, size_));
  expect_ok(device_->synchronize(stream_));
}

TEST_F(CudaDeviceTest, PinsARangeOnce) {
  std::vector<std::byte> host(size_.count());
  expect_ok(device_->pin(host.data(), size_));
  const Status again = device_->pin(host.data(), size_);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.error().code, Errc::kInvalidArgument) << again.error().text;
  device_->unpin(host.data(), size_);
  expect_ok(device_->pin(host.data(), size_));
  device_->unpin(host.data(), size_);
}

TEST_F(CudaDeviceTest, HostWorkRunsInOrderAndMayThrow) {
  std::vector<int> order;
  for (int i = 0; i < 50; ++i) {
    expect_ok(device_->launch_host(stream_, [&order, i] { order.push_back(i); }));
  }
  expect_ok(device_->synchronize(stream_));
  ASSERT_EQ(order.size(), 50U);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  expect_ok(device_->launch_host(stream_, [] { throw std::runtime_error("no such expert"); }));
  const Status failed = device_->synchronize(stream_);
  ASSERT_FALSE(failed.ok());
  EXPECT_NE(failed.error().text.find("no such expert"), std::string::npos);
  expect_ok(device_->synchronize(stream_));
}

TEST_F(CudaDeviceTest, EveryThreadMayCall) {
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      const auto own = device_->create_stream(StreamPriority::kNormal);
      ASSERT_TRUE(own.ok()) << own.error().text;
      {
        const Backed block(*device_, size_);
        Pinned host(*device_, size_);
        expect_ok(device_->fill(*own, block.at(), static_cast<std::uint8_t>(t), size_));
        expect_ok(device_->copy(*own, Direction::kD2H, host.at(), block.at(), size_));
        expect_ok(device_->synchronize(*own));
        expect_all(host.bytes(), static_cast<std::byte>(t));
      }
      device_->destroy_stream(*own);
    });
  }
}

TEST_F(CudaDeviceTest, TheCopyEngineMovesBothWaysAtOnce) {
  auto engine = CopyEngine::create(*device_);
  ASSERT_TRUE(engine.ok()) << engine.error().text;
  const Backed hbm(*device_, 2 * size_);
  Pinned up(*device_, size_);
  Pinned down(*device_, size_);
  std::memset(up.at(), 3, size_.count());
  const Event filled = *device_->create_event();
  expect_ok(device_->fill(stream_, hbm.at() + size_.count(), 4, size_));
  expect_ok(device_->record(stream_, filled));
  const Bytes half = size_ / 2;
  const std::array restore = {Transfer{.to = hbm.at(), .from = up.at(), .size = half},
                              Transfer{.to = hbm.at() + half.count(), .from = up.at(half), .size = half}};
  const std::array spill = {Transfer{.to = down.at(), .from = hbm.at() + size_.count(), .size = size_}};
  const std::array back = {Transfer{.to = down.at(), .from = hbm.at(), .size = size_}};
  {
    const auto restored =
        (*engine)->submit({.direction = Direction::kH2D, .reason = CopyReason::kRestore}, restore);
    const auto spilled = (*engine)->submit({.direction = Direction::kD2H,
                                            .after = filled,
                                            .reason = CopyReason::kSpill,
                                            .priority = CopyPriority::kBackground},
                                           spill);
    ASSERT_TRUE(restored.ok() && spilled.ok());
    expect_ok(spilled->synchronize());
    expect_ok(restored->synchronize());
    EXPECT_TRUE(restored->done() && spilled->done());
    EXPECT_EQ(restored->bytes(), size_);
    expect_all(down.bytes(), std::byte{4});
    for (const auto* ticket : {&*restored, &*spilled}) {
      const auto seconds = (*engine)->seconds(*ticket);
      ASSERT_TRUE(seconds.ok()) << seconds.error().text;
      EXPECT_GT(*seconds, 0);
    }
    expect_ok(restored->order_before(stream_));
    expect_ok(device_->record(stream_, filled));
    const auto read = (*engine)->submit(
        {.direction = Direction::kD2H, .after = filled, .reason = CopyReason::kSpill}, back);
    ASSERT_TRUE(read.ok());
    expect_ok(read->synchronize());
    expect_all(down.bytes(), std::byte{3});
  }
  device_->destroy_event(filled);
}

TEST_F(CudaDeviceTest, TwoDevicesShareThePrimaryContext) {
  const Backed block(*device_, size_);
  Pinned host(*device_, size_);
  {
    auto second = open_cuda_device(DeviceId{});
    ASSERT_TRUE(second.ok()) << second.error().text;
    const auto stream = (*second)->create_stream(StreamPriority::kNormal);
    ASSERT_TRUE(stream.ok()) << stream.error().text;
    expect_ok((*second)->fill(*stream, block.at(), 9, size_));
    expect_ok((*second)->synchronize(*stream));
  }
  // The first lives on after the second has gone.
  expect_ok(device_->copy(stream_, Direction::kD2H, host.at(), block.at(), size_));
  expect_ok(device_->synchronize(stream_));
  expect_all(host.bytes(), std::byte{9});
}

// Numbers of every size and kind, in sizes around a block of 128 and one that fills the device.
TEST_F(CudaDeviceTest, PacksNumbersToTheBytesOfTheEmulatedDevice) {
  const auto reference = std::move(open_emulated_device({.capacity = 1_MiB})).value();
  const Stream other = *reference->create_stream(StreamPriority::kNormal);
  const Backed numbers(*device_, size_), packed(*device_, size_), sums(*device_, size_);
  Pinned host(*device_, size_), back(*device_, size_);
  std::mt19937 random(5);
  for (const Element element : {Element::kF32, Element::kBf16}) {
    for (const std::uint64_t count : {1, 3, 127, 128, 130, 4099, 1'900'000}) {
      const Bytes size(count * (element == Element::kF32 ? 4 : 2));
      const Bytes small(fp8_bytes(count));
      for (std::uint64_t i = 0; i < size.count(); ++i) host.bytes()[i] = static_cast<std::byte>(random());
      std::vector<std::byte> expected(small.count()), unpacked(size.count());
      Fp8Error error{}, seen{};
      expect_ok(reference->pack_fp8(other, {element, count, host.at(), expected.data(), &error}));
      expect_ok(reference->unpack_fp8(other, {element, count, unpacked.data(), expected.data(), nullptr}));
      expect_ok(reference->synchronize(other));
      auto* const device_sums = reinterpret_cast<Fp8Error*>(sums.at());
      expect_ok(device_->fill(stream_, sums.at(), 0, Bytes(sizeof seen)));
      expect_ok(device_->copy(stream_, Direction::kH2D, numbers.at(), host.at(), size));
      expect_ok(device_->pack_fp8(stream_, {element, count, numbers.at(), packed.at(), device_sums}));
      expect_ok(device_->fill(stream_, numbers.at(), 0x5A, size_));
      expect_ok(device_->unpack_fp8(stream_, {element, count, numbers.at(), packed.at(), nullptr}));
      expect_ok(device_->copy(stream_, Direction::kD2H, back.at(), packed.at(), small));
      expect_ok(device_->synchronize(stream_));
      EXPECT_EQ(std::memcmp(back.at(), expected.data(), count), 0) << count << " codes";
      EXPECT_EQ(std::memcmp(back.at(Bytes(fp8_code_bytes(count))), expected.data() + fp8_code_bytes(count),
                            fp8_blocks(count)),
                0)
          << count << " numbers' exponents";
      expect_ok(device_->copy(stream_, Direction::kD2H, back.at(), numbers.at(), size));
      expect_ok(device_->copy(stream_, Direction::kD2H, host.at(), sums.at(), Bytes(sizeof seen)));
      expect_ok(device_->synchronize(stream_));
      EXPECT_EQ(std::memcmp(back.at(), unpacked.data(), size.count()), 0) << count << " numbers";
      std::memcpy(&seen, host.at(), sizeof seen);
      EXPECT_NEAR(seen.error_sum, error.error_sum, 1e-9 * error.magnitude_sum) << count;
      EXPECT_NEAR(seen.magnitude_sum, error.magnitude_sum, 1e-9 * error.magnitude_sum) << count;
      EXPECT_EQ(seen.largest_share, error.largest_share) << count;
    }
  }
  reference->destroy_stream(other);
}

TEST_F(CudaDeviceTest, FaultPointsAreAskedFirst) {
  const Bytes before = device_->memory()->free;
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceCreatePhysical, 1));
    const auto refused = device_->create_physical(size_);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Errc::kOutOfMemory);
  }
  EXPECT_EQ(device_->memory()->free, before);
}

}  // namespace
}  // namespace terrace
