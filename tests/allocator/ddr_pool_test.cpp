#include "allocator/ddr_pool.hpp"

#include <gtest/gtest.h>
#include <numa.h>
#include <numaif.h>

#include <cstring>
#include <random>
#include <vector>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

class DdrPoolTest : public testing::Test {
 protected:
  DdrPoolTest() : device_(std::move(open_emulated_device({.capacity = 1_MiB})).value()) {}
  std::unique_ptr<DdrPool> make(Bytes budget, Bytes slab = 1_MiB) {
    return std::move(DdrPool::create(*device_, {.budget = budget, .slab = slab})).value();
  }
  std::unique_ptr<Device> device_;
};

TEST_F(DdrPoolTest, PinsNoMoreThanItsBudget) {
  auto pool = make(3_MiB);
  std::vector<Block> blocks;
  while (auto block = pool->allocate(300_KiB, Pool::kActivation)) blocks.push_back(*block);
  EXPECT_LE(pool->usage().mapped, 3_MiB);
  EXPECT_GE(blocks.size(), 9U);
  auto refused = pool->allocate(300_KiB, Pool::kActivation);
  EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
  for (const Block& block : blocks) pool->free(block);
  EXPECT_EQ(pool->usage().live, 0_B);
}

TEST_F(DdrPoolTest, ABlockLargerThanASlabComesAtItsExactSize) {
  auto pool = make(16_MiB);
  const Block block = *pool->allocate(5_MiB + 1_B, Pool::kOptimizer);
  EXPECT_EQ(pool->usage().mapped, 5_MiB + 4_KiB);
  std::memset(block.address, 1, block.size.count());
  pool->free(block);
}

TEST_F(DdrPoolTest, FreedMemoryIsReusedWithoutPinningAgain) {
  auto pool = make(16_MiB);
  const Block first = *pool->allocate(700_KiB, Pool::kActivation);
  pool->free(first);
  const Block second = *pool->allocate(700_KiB, Pool::kActivation);
  EXPECT_EQ(first.address, second.address);
  EXPECT_EQ(pool->usage().mapped, 1_MiB);
  pool->free(second);
}

TEST_F(DdrPoolTest, ABudgetOfZeroRefusesEverything) {
  auto pool = make(0_B);
  EXPECT_EQ(pool->allocate(1_B, Pool::kActivation).error().code, Errc::kOutOfBudget);
}

TEST_F(DdrPoolTest, ARefusedPinOrMapLeavesNothingBehind) {
  for (const FaultPoint point : {FaultPoint::kHostMap, FaultPoint::kDevicePin}) {
    auto pool = make(16_MiB);
    {
      ScopedFaults faults(fail_call(point, 1));
      EXPECT_FALSE(pool->allocate(1_MiB, Pool::kActivation));
      EXPECT_TRUE(faults.fired());
    }
    EXPECT_EQ(pool->usage().mapped, 0_B);
    const Block block = *pool->allocate(1_MiB, Pool::kActivation);
    pool->free(block);
  }
}

TEST_F(DdrPoolTest, SlabsAreBoundToTheNodeNamed) {
  int mode = MPOL_DEFAULT;
  if (numa_available() < 0 || get_mempolicy(&mode, nullptr, 0, nullptr, 0) != 0) {
    GTEST_SKIP() << "this system lets nobody ask where memory is";
  }
  for (const bool bound : {false, true}) {
    auto pool =
        std::move(DdrPool::create(*device_, {.budget = 2_MiB,
                                             .slab = 1_MiB,
                                             .numa_nodes = bound ? std::vector<int>{0} : std::vector<int>{}}))
            .value();
    const Block block = *pool->allocate(100_KiB, Pool::kActivation);
    ASSERT_EQ(get_mempolicy(&mode, nullptr, 0, block.address, MPOL_F_ADDR), 0);
    EXPECT_EQ(mode != MPOL_DEFAULT, bound);
    pool->free(block);
  }
}

TEST_F(DdrPoolTest, KeepsEveryByteThroughRandomUse) {
  std::mt19937 random(3);
  auto pool = make(8_MiB);
  std::vector<std::pair<Block, int>> live;
  for (int i = 0; i < 3000; ++i) {
    if (live.empty() || random() % 2 == 0) {
      auto block = pool->allocate(Bytes(1 + random() % 300'000), Pool::kActivation);
      if (!block) continue;
      const int tag = static_cast<int>(random() % 256);
      std::memset(block->address, tag, block->size.count());
      live.emplace_back(*block, tag);
    } else {
      std::swap(live[random() % live.size()], live.back());
      const auto [block, tag] = live.back();
      live.pop_back();
      EXPECT_EQ(std::to_integer<int>(block.address[0]), tag);
      EXPECT_EQ(std::to_integer<int>(block.address[block.size.count() - 1]), tag);
      pool->free(block);
    }
  }
  for (const auto& [block, tag] : live) pool->free(block);
}

}  // namespace
}  // namespace terrace
