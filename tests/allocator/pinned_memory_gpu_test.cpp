// Pinned memory on a real GPU: what the emulated device cannot show is that the driver takes these
// registrations, the copies that cross them, and host memory under a reserved address.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "allocator/ddr_pool.hpp"
#include "allocator/host_handle_pool.hpp"
#include "runtime/device.hpp"
#include "runtime/pin_step.hpp"
#include "runtime/topology.hpp"

namespace terrace {
namespace {

constexpr Bytes kSize = 3 * kPinStep + 2_MiB;  // four registrations

class PinnedMemoryGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no GPU here";
    device_ = std::move(open_cuda_device(DeviceId{0})).value();
    stream_ = *device_->create_stream(StreamPriority::kNormal);
    hbm_ = *device_->reserve(kSize);
    physical_ = *device_->create_physical(kSize);
    ASSERT_TRUE(device_->map(hbm_, physical_, kSize).ok());
  }
  void TearDown() override {
    if (device_ == nullptr) return;
    device_->destroy_stream(stream_);
    EXPECT_TRUE(device_->unmap(hbm_, kSize).ok());
    device_->destroy_physical(physical_);
    device_->release(hbm_, kSize);
  }
  static void write_pattern(Address at, Bytes size) {
    auto* words = reinterpret_cast<std::uint64_t*>(at);
    for (std::uint64_t i = 0; i < size.count() / 8; ++i) words[i] = i * 0x9e3779b97f4a7c15ULL;
  }
  static bool has_pattern(Address at, Bytes size) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(at);
    for (std::uint64_t i = 0; i < size.count() / 8; ++i) {
      if (words[i] != i * 0x9e3779b97f4a7c15ULL) return false;
    }
    return true;
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  Address hbm_ = nullptr;
  Physical physical_;
};

TEST_F(PinnedMemoryGpuTest, CopiesCrossRegistrations) {
  auto pool = std::move(DdrPool::create(*device_, {.budget = kSize})).value();
  const Block block = *pool->allocate(kSize, Pool::kOptimizer);
  write_pattern(block.address, kSize);
  ASSERT_TRUE(device_->copy(stream_, Direction::kH2D, hbm_, block.address, kSize).ok());
  ASSERT_TRUE(device_->synchronize(stream_).ok());
  std::memset(block.address, 0, kSize.count());
  // In two pieces, neither of which begins or ends with a registration.
  const Bytes half = kSize / 2 + 4_KiB;
  const std::vector<Transfer> pieces{{block.address, hbm_, half},
                                     {block.address + half.count(), hbm_ + half.count(), kSize - half}};
  ASSERT_TRUE(device_->copy_batch(stream_, Direction::kD2H, pieces).ok());
  ASSERT_TRUE(device_->synchronize(stream_).ok());
  EXPECT_TRUE(has_pattern(block.address, kSize));
  std::memset(block.address, 0, kSize.count());
  ASSERT_TRUE(device_->copy(stream_, Direction::kD2H, block.address, hbm_, kSize).ok());
  ASSERT_TRUE(device_->synchronize(stream_).ok());
  EXPECT_TRUE(has_pattern(block.address, kSize));
  EXPECT_TRUE(pool->free(block).ok());
  EXPECT_EQ(pool->trim(), kSize);
}

TEST_F(PinnedMemoryGpuTest, ABlockMovesToHostMemoryAtItsOwnAddress) {
  std::vector<int> nodes;
  if (const auto topology = Topology::of_this_machine()) {
    for (const NumaNode& node : topology->nodes()) nodes.push_back(node.index);
  }
  auto lease = std::make_shared<HostLease>(2 * kSize);
  auto handles = HostHandlePool::create(*device_, {.lease = lease, .nodes = nodes, .chunk = 2_MiB});
  if (!handles) {
    EXPECT_EQ(handles.error().code, Errc::kNotSupported) << handles.error().text;
    GTEST_SKIP() << handles.error().text;
  }
  const auto handle = *(*handles)->take(kSize);
  ASSERT_EQ(handle.size, kSize);
  ASSERT_TRUE(device_->fill(stream_, hbm_, 0x3c, kSize).ok());
  const Address elsewhere = *device_->reserve(kSize);
  ASSERT_TRUE(device_->map(elsewhere, handle.physical, kSize).ok());
  ASSERT_TRUE(device_->copy(stream_, Direction::kD2D, elsewhere, hbm_, kSize).ok());
  ASSERT_TRUE(device_->synchronize(stream_).ok());
  ASSERT_TRUE(device_->unmap(elsewhere, kSize).ok());
  device_->release(elsewhere, kSize);
  ASSERT_TRUE(device_->unmap(hbm_, kSize).ok());
  ASSERT_TRUE(device_->map(hbm_, handle.physical, kSize).ok());
  EXPECT_EQ(hbm_[0], std::byte{0x3c}) << "the host reads it at the device's address";
  EXPECT_EQ(hbm_[kSize.count() - 1], std::byte{0x3c});
  ASSERT_TRUE(device_->unmap(hbm_, kSize).ok());
  EXPECT_TRUE((*handles)->give_back(handle).ok());
  ASSERT_TRUE(device_->map(hbm_, physical_, kSize).ok());
}

}  // namespace
}  // namespace terrace
