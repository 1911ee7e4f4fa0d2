// Who reaches what: mapped host memory, memory of a second device, copies in batches, streams that are gone.
// On every device there is; the cuda half skips, saying so, where there is none.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "runtime/device.hpp"

namespace terrace {
namespace {

void expect_ok(const Status& status) { EXPECT_TRUE(status.ok()) << status.error().text; }

class DeviceReachTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "cuda" && !cuda_available())
      GTEST_SKIP() << "no CUDA driver with a device here: " << open_cuda_device({}).error().text;
    auto opened = open_device(GetParam(), {.numa_nodes = 2});
    ASSERT_TRUE(opened.ok()) << opened.error().text;
    device_ = std::move(opened).value();
    auto stream = device_->create_stream(StreamPriority::kNormal);
    ASSERT_TRUE(stream.ok()) << stream.error().text;
    stream_ = *stream;
    size_ = round_up(4_MiB, device_->info().granularity);
    host_.assign(size_.count(), std::byte{0});
    expect_ok(device_->pin(host_.data(), size_));
  }
  void TearDown() override {
    if (device_ == nullptr) return;
    device_->unpin(host_.data(), size_);
    if (device_->alive(stream_)) device_->destroy_stream(stream_);
  }
  // What is at a device address, through the pinned buffer.
  std::vector<std::byte> read(const std::byte* from) {
    expect_ok(device_->copy(stream_, Direction::kD2H, host_.data(), from, size_));
    expect_ok(device_->synchronize(stream_));
    return host_;
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  Bytes size_;
  std::vector<std::byte> host_;
};

class Mapped {
 public:
  Mapped(Device& device, Physical physical, Bytes size)
      : device_(device), physical_(physical), size_(size), at_(device.reserve(size).value()) {
    expect_ok(device.map(at_, physical, size));
  }
  ~Mapped() {
    expect_ok(device_.unmap(at_, size_));
    device_.destroy_physical(physical_);
    device_.release(at_, size_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  [[nodiscard]] Address at() const { return at_; }

 private:
  Device& device_;
  Physical physical_;
  Bytes size_;
  Address at_;
};

TEST_P(DeviceReachTest, HostAndDeviceReachMappedHostMemory) {
  if (!device_->info().can.host_physical) GTEST_SKIP() << "no host NUMA memory management on this device";
  const auto physical = device_->create_host_physical(size_, 0);
  if (!physical.ok())
    GTEST_SKIP() << "this machine serves no host memory on node 0: " << physical.error().text;
  const Mapped mapped(*device_, *physical, size_);
  std::memset(mapped.at(), 0x3C, size_.count());
  EXPECT_EQ(read(mapped.at()), std::vector<std::byte>(size_.count(), std::byte{0x3C}));
  expect_ok(device_->fill(stream_, mapped.at(), 0x77, size_));
  expect_ok(device_->synchronize(stream_));
  EXPECT_EQ(mapped.at()[size_.count() - 1], std::byte{0x77});
}

TEST_P(DeviceReachTest, ANodeThatIsNotThereIsNotSupported) {
  const auto refused = device_->create_host_physical(size_, 63);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kNotSupported) << refused.error().text;
  EXPECT_NE(refused.error().text.find("node 63"), std::string::npos) << refused.error().text;
}

TEST_P(DeviceReachTest, HostMemoryIsNotTakenFromTheDevices) {
  if (!device_->info().can.host_physical) GTEST_SKIP() << "no host NUMA memory management on this device";
  const Bytes before = device_->memory()->free;
  const auto physical = device_->create_host_physical(size_, 0);
  if (!physical.ok())
    GTEST_SKIP() << "this machine serves no host memory on node 0: " << physical.error().text;
  EXPECT_EQ(device_->memory()->free, before);
  device_->destroy_physical(*physical);
}

TEST_P(DeviceReachTest, ABatchMovesEveryPiece) {
  const Mapped mapped(*device_, device_->create_physical(size_).value(), size_);
  const Bytes piece = size_ / 8;
  for (std::size_t i = 0; i < host_.size(); ++i) host_[i] = static_cast<std::byte>(i / piece.count() + 1);
  std::vector<Transfer> pieces;
  for (std::uint64_t i = 0; i < 8; ++i) {
    // The last piece first: where each goes does not depend on its place in the batch.
    const std::uint64_t from = (7 - i) * piece.count();
    pieces.push_back({mapped.at() + i * piece.count(), host_.data() + from, piece});
  }
  pieces.push_back({mapped.at(), host_.data(), 0_B});
  expect_ok(device_->copy_batch(stream_, Direction::kH2D, pieces));
  expect_ok(device_->copy_batch(stream_, Direction::kH2D, {}));
  expect_ok(device_->synchronize(stream_));
  const std::vector<std::byte> seen = read(mapped.at());
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(seen[i * piece.count()], static_cast<std::byte>(8 - i));
    EXPECT_EQ(seen[(i + 1) * piece.count() - 1], static_cast<std::byte>(8 - i));
  }
}

TEST_P(DeviceReachTest, PiecesAreMappedNextToEachOtherOrNotAtAll) {
  const Address at = device_->reserve(4 * size_).value();
  std::vector<PhysicalPiece> pieces;
  for (const std::uint64_t sizes : {1, 2, 1}) {
    pieces.push_back({device_->create_physical(sizes * size_).value(), sizes * size_});
  }
  expect_ok(device_->map_all(at, pieces));
  expect_ok(device_->fill(stream_, at, 0x44, 4 * size_));
  EXPECT_EQ(read(at + 3 * size_.count()), std::vector<std::byte>(size_.count(), std::byte{0x44}));
  // The second of these is mapped already, or never was: the first is not left behind.
  expect_ok(device_->unmap(at, size_));
  const std::vector<PhysicalPiece> with_a_stranger{pieces[0], {Physical{~0ULL}, size_}};
  EXPECT_FALSE(device_->map_all(at, with_a_stranger).ok());
  const std::vector<PhysicalPiece> onto_another{pieces[0], pieces[0]};
  EXPECT_FALSE(device_->map_all(at, onto_another).ok());
  const std::vector<PhysicalPiece> of_another_size{{pieces[0].physical, 2 * size_}};
  EXPECT_FALSE(device_->map_all(at, of_another_size).ok());
  expect_ok(device_->map(at, pieces[0].physical, size_));
  expect_ok(device_->unmap(at, 4 * size_));
  for (const PhysicalPiece& piece : pieces) device_->destroy_physical(piece.physical);
  device_->release(at, 4 * size_);
}

TEST_P(DeviceReachTest, AStreamIsAliveUntilDestroyed) {
  EXPECT_TRUE(device_->alive(stream_));
  device_->destroy_stream(stream_);
  EXPECT_FALSE(device_->alive(stream_));
  // A later stream does not answer to the old name.
  const Stream later = device_->create_stream(StreamPriority::kNormal).value();
  EXPECT_FALSE(device_->alive(stream_));
  device_->destroy_stream(later);
}

TEST_P(DeviceReachTest, APeerOfAnotherKindIsRefused) {
  auto other = open_emulated_device({});
  ASSERT_TRUE(other.ok());
  const Status granted = device_->grant_access_to(**other);
  if (device_->info().kind == "emulated") return expect_ok(granted);
  ASSERT_FALSE(granted.ok());
  EXPECT_EQ(granted.error().code, Errc::kNotSupported);
}

TEST_P(DeviceReachTest, APeerReachesWhatIsMappedBeforeAndAfter) {
  auto opened = device_->info().kind == "cuda" ? open_cuda_device({.index = 1}) : open_emulated_device({});
  if (!opened.ok()) GTEST_SKIP() << "one device here: " << opened.error().text;
  Device& peer = **opened;
  const Mapped before(*device_, device_->create_physical(size_).value(), size_);
  expect_ok(device_->grant_access_to(peer));
  expect_ok(device_->grant_access_to(peer));
  const Mapped after(*device_, device_->create_physical(size_).value(), size_);
  const Mapped own(peer, peer.create_physical(size_).value(), size_);
  const Stream theirs = peer.create_stream(StreamPriority::kNormal).value();
  expect_ok(peer.fill(theirs, own.at(), 0x21, size_));
  expect_ok(peer.copy(theirs, Direction::kPeer, before.at(), own.at(), size_));
  expect_ok(peer.copy(theirs, Direction::kPeer, after.at(), own.at(), size_));
  expect_ok(peer.synchronize(theirs));
  peer.destroy_stream(theirs);
  const std::vector<std::byte> sent(size_.count(), std::byte{0x21});
  EXPECT_EQ(read(before.at()), sent);
  EXPECT_EQ(read(after.at()), sent);
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceReachTest, testing::Values("emulated", "cuda"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace terrace
