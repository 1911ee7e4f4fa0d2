// Tiers on real devices: what the emulated one cannot show is that the driver takes these calls and these
// addresses.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/allocator/tier_rig.hpp"

namespace terrace {
namespace {

// HBM of a GPU, seen from the host through pinned memory.
class GpuMemory {
 public:
  GpuMemory(Device& device, Bytes least)
      : size(round_up(least, device.info().granularity)),
        device_(device),
        host_(size.count()),
        stream(*device.create_stream(StreamPriority::kNormal)),
        hbm(*device.reserve(size)),
        physical_(*device.create_physical(size)),
        cleared_(*device.create_event()) {
    EXPECT_TRUE(device.map(hbm, physical_, size));
    EXPECT_TRUE(device.pin(host_.data(), size));
  }
  ~GpuMemory() {
    device_.destroy_event(cleared_);
    device_.destroy_stream(stream);
    device_.unpin(host_.data(), size);
    EXPECT_TRUE(device_.unmap(hbm, size));
    device_.destroy_physical(physical_);
    device_.release(hbm, size);
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  // Stores a pattern, clears HBM, and asks for it back in stream order.
  void round_trip(Tier& tier, std::uint64_t tag) {
    write_pattern(host_.data(), size, tag);
    EXPECT_TRUE(device_.copy(stream, Direction::kH2D, hbm, host_.data(), size));
    EXPECT_TRUE(device_.record(stream, cleared_));
    const TierBlock block = *tier.allocate(size, Pool::kActivation);
    EXPECT_TRUE(tier.store(block, hbm, cleared_)->synchronize());
    EXPECT_TRUE(device_.fill(stream, hbm, 0, size));
    EXPECT_TRUE(device_.record(stream, cleared_));
    const auto loaded = tier.load(hbm, block, cleared_);
    EXPECT_TRUE(loaded->wait_on(stream));
    EXPECT_TRUE(device_.copy(stream, Direction::kD2H, host_.data(), hbm, size));
    EXPECT_TRUE(device_.synchronize(stream));
    EXPECT_TRUE(has_pattern(host_.data(), size, tag));
    EXPECT_TRUE(tier.free(block));
  }

  const Bytes size;

 private:
  Device& device_;
  std::vector<std::byte> host_;

 public:
  const Stream stream;
  const Address hbm;

 private:
  const Physical physical_;
  const Event cleared_;
};

TEST(TierGpu, PinnedMemoryAndFilesOfOneGpu) {
  auto opened = open_cuda_device({.index = 0});
  if (!opened) GTEST_SKIP() << "needs a GPU: " << opened.error().text;
  Device& device = **opened;
  const ScratchFolder folder;
  auto pool = std::move(DdrPool::create(device, {.budget = 256_MiB})).value();
  auto copies = std::move(CopyEngine::create(device)).value();
  GpuMemory memory(device, 40_MiB);
  DdrTier ddr(device, *pool, *copies);
  memory.round_trip(ddr, 1);
  for (const IoChoice io : {IoChoice::kAuto, IoChoice::kThreads}) {
    auto nvme =
        NvmeTier::create(device, *pool, *copies, {.folder = folder.path(), .size = 128_MiB, .io = io});
    ASSERT_TRUE(nvme) << nvme.error().text;
    memory.round_trip(**nvme, 2);
    memory.round_trip(**nvme, 3);
  }
}

TEST(TierGpu, HbmOfANeighbour) {
  auto first = open_cuda_device({.index = 0});
  auto second = open_cuda_device({.index = 1});
  if (!first || !second) GTEST_SKIP() << "needs two GPUs";
  auto tier = PeerTier::create(**first, **second, {.budget = 128_MiB, .slab = 32_MiB});
  if (!tier) GTEST_SKIP() << "the two GPUs reach no common memory: " << tier.error().text;
  GpuMemory memory(**first, 40_MiB);
  memory.round_trip(**tier, 4);
  memory.round_trip(**tier, 5);
}

}  // namespace
}  // namespace terrace
