#include "allocator/ddr_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "allocator/host_handle_pool.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

class DdrPoolTest : public testing::Test {
 protected:
  std::unique_ptr<DdrPool> make(Bytes budget, Bytes slab = 1_MiB) {
    return std::move(DdrPool::create(*device_, {.budget = budget, .slab = slab})).value();
  }
  std::unique_ptr<EmulatedDevice> device_ =
      std::move(EmulatedDevice::create({.capacity = 1_MiB, .numa_nodes = 2})).value();
};

TEST_F(DdrPoolTest, PinsNoMoreThanItsBudget) {
  auto pool = make(8_MiB);
  std::vector<Block> blocks;
  while (auto block = pool->allocate(300_KiB, Pool::kActivation)) blocks.push_back(*block);
  EXPECT_LE(pool->usage().mapped, 8_MiB);
  EXPECT_GE(blocks.size(), 21U) << "at most a quarter is lost to size classes";
  while (auto block = pool->allocate(4_KiB, Pool::kActivation)) blocks.push_back(*block);
  auto refused = pool->allocate(300_KiB, Pool::kGradient);
  ASSERT_EQ(refused.error().code, Errc::kOutOfBudget);
  EXPECT_EQ(refused.error().bytes, 300_KiB);
  EXPECT_EQ(refused.error().pool, Pool::kGradient);
  EXPECT_THAT(refused.error().text, HasSubstr("DDR budget of 8.0 MiB"));
  for (const Block& block : blocks) EXPECT_TRUE(pool->free(block).ok());
  EXPECT_EQ(pool->usage().live, 0_B);
}

TEST_F(DdrPoolTest, LargeBlocksComeAtTheirExactSize) {
  auto pool = make(16_MiB);
  const Block block = *pool->allocate(5_MiB + 1_B, Pool::kOptimizer);
  EXPECT_EQ(pool->usage().mapped, 5_MiB + 4_KiB);
  EXPECT_EQ(pool->usage().live, 5_MiB + 4_KiB);
  std::memset(block.address, 1, block.size.count());
  EXPECT_TRUE(pool->free(block).ok());
}

// What is pinned ahead grows with what is mapped. Large blocks must not each leave a tail of it that the next
// does not fit: with 48 MiB mapped, that was 2 MiB behind each block of 4.
TEST_F(DdrPoolTest, LargeBlocksOfSeveralSizesFillTheBudget) {
  auto pool = make(64_MiB);
  std::vector<Block> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(*pool->allocate(6_MiB, Pool::kOptimizer));
  for (int i = 0; i < 4; ++i) {
    auto block = pool->allocate(4_MiB, Pool::kOptimizer);
    ASSERT_TRUE(block) << i << ": " << block.error().text;
    blocks.push_back(*block);
  }
  EXPECT_EQ(pool->usage().mapped, 64_MiB);
  for (const Block& block : blocks) EXPECT_TRUE(pool->free(block).ok());
}

TEST_F(DdrPoolTest, FreedMemoryIsReusedWithoutPinningAgain) {
  auto pool = make(16_MiB);
  for (const Bytes size : {1700_KiB, 60_KiB}) {
    const Block first = *pool->allocate(size, Pool::kActivation);
    EXPECT_TRUE(pool->free(first).ok());
    const Bytes mapped = pool->usage().mapped;
    const Block second = *pool->allocate(size, Pool::kActivation);
    EXPECT_EQ(first.address, second.address);
    EXPECT_EQ(pool->usage().mapped, mapped);
    EXPECT_TRUE(pool->free(second).ok());
  }
}

TEST_F(DdrPoolTest, ZeroAndAbsurdSizes) {
  auto pool = make(4_MiB);
  const auto empty = pool->allocate(0_B, Pool::kActivation);
  const auto other = pool->allocate(0_B, Pool::kActivation);
  ASSERT_TRUE(empty && other);
  EXPECT_NE(empty->address, other->address);
  EXPECT_TRUE(pool->free(*empty).ok());
  EXPECT_TRUE(pool->free(*other).ok());
  for (const std::uint64_t size : {~0UL, ~0UL - 4096, 1UL << 63, 1UL << 40}) {
    const auto refused = pool->allocate(Bytes(size), Pool::kActivation);
    EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
    EXPECT_EQ(refused.error().bytes, Bytes(size));
  }
}

TEST_F(DdrPoolTest, ABudgetOfZeroRefusesEverything) {
  auto pool = make(0_B);
  EXPECT_EQ(pool->allocate(1_B, Pool::kActivation).error().code, Errc::kOutOfBudget);
  EXPECT_EQ(pool->allocate(0_B, Pool::kActivation).error().code, Errc::kOutOfBudget);
}

TEST_F(DdrPoolTest, WhatIsNoLiveBlockIsNotFreed) {
  auto pool = make(16_MiB);
  for (const Bytes size : {2_MiB, 9_KiB}) {
    const Block block = *pool->allocate(size, Pool::kActivation);
    const Block kept = *pool->allocate(size, Pool::kActivation);
    std::byte foreign{};
    const auto refusal = [&](Address address) {
      const Status freed = pool->free({address, size, Pool::kActivation});
      EXPECT_EQ(freed.ok() ? Errc::kIo : freed.error().code, Errc::kInvalidArgument);
      return freed.ok() ? std::string() : freed.error().text;
    };
    EXPECT_THAT(refusal(block.address + 4096), HasSubstr("inside one"));
    EXPECT_THAT(refusal(&foreign), HasSubstr("not of this pool"));
    EXPECT_THAT(refusal(nullptr), HasSubstr("not of this pool"));
    ASSERT_TRUE(pool->free(block).ok());
    const Bytes live = pool->usage().live;
    EXPECT_THAT(refusal(block.address), HasSubstr("freed already"));
    EXPECT_EQ(pool->usage().live, live);
    EXPECT_TRUE(pool->free(kept).ok());
  }
}

TEST_F(DdrPoolTest, ALowerBudgetUnpinsWhatIsFreeAndSaysWhatIsNot) {
  auto pool = make(32_MiB);
  const Block kept = *pool->allocate(3_MiB, Pool::kActivation);
  const Block freed = *pool->allocate(5_MiB, Pool::kActivation);
  const Block small = *pool->allocate(30_KiB, Pool::kActivation);
  ASSERT_TRUE(pool->free(freed).ok());
  ASSERT_TRUE(pool->free(small).ok());
  EXPECT_EQ(pool->set_budget(2_MiB), 1_MiB);
  EXPECT_EQ(device_->pinned_bytes(), 3_MiB);
  EXPECT_EQ(pool->usage().budget, 2_MiB);
  EXPECT_FALSE(pool->allocate(4_KiB, Pool::kActivation));
  std::memset(kept.address, 1, kept.size.count());
  ASSERT_TRUE(pool->free(kept).ok());
  EXPECT_EQ(pool->set_budget(2_MiB), 0_B);
  EXPECT_EQ(device_->pinned_bytes(), 0_B);
  EXPECT_EQ(pool->set_budget(32_MiB), 0_B);
  const Block again = *pool->allocate(5_MiB, Pool::kActivation);
  EXPECT_TRUE(pool->free(again).ok());
  EXPECT_GE(pool->trim(), 5_MiB);
  EXPECT_EQ(pool->usage().mapped, 0_B);
}

TEST_F(DdrPoolTest, SmallBlocksMakeWayForALargeOne) {
  auto pool = make(2_MiB);
  std::vector<Block> blocks;
  while (auto block = pool->allocate(100_KiB, Pool::kActivation)) blocks.push_back(*block);
  for (const Block& block : blocks) ASSERT_TRUE(pool->free(block).ok());
  const auto large = pool->allocate(2_MiB, Pool::kActivation);
  ASSERT_TRUE(large) << large.error().text;
  EXPECT_TRUE(pool->free(*large).ok());
}

TEST_F(DdrPoolTest, HandlesAndBlocksShareOneLease) {
  auto lease = std::make_shared<HostLease>(16_MiB);
  auto pool = std::move(DdrPool::create(*device_, {.budget = 0_B, .lease = lease, .slab = 1_MiB})).value();
  auto handles = std::move(HostHandlePool::create(*device_, {.lease = lease, .chunk = 4_MiB})).value();
  const Block block = *pool->allocate(9_MiB, Pool::kOptimizer);
  const auto handle = *handles->take(4_MiB);
  EXPECT_EQ(lease->held(), 13_MiB);
  EXPECT_EQ(handles->take(4_MiB).error().code, Errc::kOutOfBudget);
  EXPECT_EQ(pool->allocate(4_MiB, Pool::kOptimizer).error().code, Errc::kOutOfBudget);
  // What one pool keeps for reuse is the other's once it is trimmed.
  ASSERT_TRUE(handles->give_back(handle).ok());
  EXPECT_FALSE(pool->allocate(4_MiB, Pool::kOptimizer));
  EXPECT_EQ(handles->trim(HostHandlePool::Until::kNothingIsKept), 4_MiB);
  const Block second = *pool->allocate(4_MiB, Pool::kOptimizer);
  EXPECT_EQ(pool->set_budget(8_MiB), 5_MiB);
  ASSERT_TRUE(pool->free(block).ok());
  ASSERT_TRUE(pool->free(second).ok());
  EXPECT_EQ(pool->trim(), 13_MiB);
  EXPECT_EQ(lease->held(), 0_B);
}

TEST_F(DdrPoolTest, ANodeThatIsNotThereIsRefused) {
  auto refused = DdrPool::create(*device_, {.budget = 1_MiB, .numa_nodes = {900}});
  if (refused) GTEST_SKIP() << "this system knows no NUMA nodes";
  EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
}

TEST_F(DdrPoolTest, UsageIsByPoolAndPeaksStartAnew) {
  auto pool = make(16_MiB);
  const Block a = *pool->allocate(2_MiB, Pool::kOptimizer);
  const Block b = *pool->allocate(3_MiB, Pool::kActivation);
  PoolUsage usage = pool->usage();
  EXPECT_EQ(usage.live, 5_MiB);
  EXPECT_EQ(usage.live_by_pool[static_cast<std::size_t>(Pool::kOptimizer)], 2_MiB);
  ASSERT_TRUE(pool->free(b).ok());
  pool->trim();
  EXPECT_EQ(pool->usage().live_peak, 5_MiB);
  EXPECT_EQ(pool->usage().mapped_peak, 5_MiB);
  pool->reset_peaks();
  EXPECT_EQ(pool->usage().live_peak, 2_MiB);
  EXPECT_EQ(pool->usage().mapped_peak, 2_MiB);
  EXPECT_TRUE(pool->free(a).ok());
}

}  // namespace
}  // namespace terrace
