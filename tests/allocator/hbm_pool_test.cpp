#include "allocator/hbm_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <semaphore>
#include <thread>
#include <vector>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

class HbmPoolTest : public testing::Test {
 protected:
  HbmPoolTest() : device_(std::move(open_emulated_device({.capacity = 64_MiB})).value()) {
    first_ = *device_->create_stream(StreamPriority::kNormal);
    second_ = *device_->create_stream(StreamPriority::kNormal);
  }
  ~HbmPoolTest() override {
    device_->destroy_stream(first_);
    device_->destroy_stream(second_);
  }
  std::unique_ptr<HbmPool> make(Bytes budget, Bytes chunk = {}) {
    return std::move(HbmPool::create(*device_, {.budget = budget, .chunk = chunk})).value();
  }
  Bytes device_in_use() { return device_->memory()->total - device_->memory()->free; }

  std::unique_ptr<Device> device_;
  Stream first_, second_;
};

TEST_F(HbmPoolTest, TheBudgetIsAWallForPhysicalMemory) {
  auto pool = make(8_MiB, 1_MiB);
  std::vector<Block> blocks;
  while (true) {
    auto block = pool->allocate(first_, 700_KiB, Pool::kActivation);
    if (!block) {
      EXPECT_EQ(block.error().code, Errc::kOutOfBudget);
      EXPECT_EQ(block.error().bytes, 700_KiB);
      EXPECT_EQ(block.error().pool, Pool::kActivation);
      break;
    }
    blocks.push_back(*block);
    EXPECT_LE(device_in_use(), 8_MiB);
  }
  EXPECT_GE(blocks.size(), 11U) << "8 MiB hold eleven blocks of 700 KiB next to each other";
  for (const Block& block : blocks) pool->free(first_, block);
  EXPECT_EQ(pool->usage().live, 0_B);
}

TEST_F(HbmPoolTest, AFreedBlockServesTheSameStreamAtOnce) {
  auto pool = make(8_MiB);
  const Block block = *pool->allocate(first_, 1_MiB, Pool::kScratch);
  pool->free(first_, block);
  const Block again = *pool->allocate(first_, 1_MiB, Pool::kScratch);
  EXPECT_EQ(again.address, block.address);
  pool->free(first_, again);
}

TEST_F(HbmPoolTest, AnotherStreamReusesABlockOnlyAfterThePointOfTheFree) {
  auto pool = make(1_MiB, 1_MiB);
  const Block block = *pool->allocate(first_, 1_MiB, Pool::kScratch);
  std::binary_semaphore gate(0);
  std::atomic<int> order{0};
  ASSERT_TRUE(device_->launch_host(first_, [&] {
    gate.acquire();
    EXPECT_EQ(order.fetch_add(1), 0);
  }));
  pool->free(first_, block);
  const Block again = *pool->allocate(second_, 1_MiB, Pool::kScratch);
  EXPECT_EQ(again.address, block.address);
  ASSERT_TRUE(
      device_->launch_host(second_, [&] { EXPECT_EQ(order.fetch_add(1), 1) << "ran before the free"; }));
  gate.release();
  ASSERT_TRUE(device_->synchronize(second_));
  pool->free(second_, again);
}

TEST_F(HbmPoolTest, LongLivedBlocksNeverSitBetweenShortLivedOnes) {
  auto pool = make(16_MiB, 1_MiB);
  std::vector<Block> activations, weights;
  for (int i = 0; i < 4; ++i) {
    activations.push_back(*pool->allocate(first_, 512_KiB, Pool::kActivation));
    weights.push_back(*pool->allocate(first_, 512_KiB, Pool::kWeights));
  }
  const auto [low, high] = std::minmax_element(activations.begin(), activations.end(),
                                               [](auto& a, auto& b) { return a.address < b.address; });
  for (const Block& weight : weights)
    EXPECT_TRUE(weight.address < low->address || weight.address > high->address);
  for (const Block& block : activations) pool->free(first_, block);
  for (const Block& block : weights) pool->free(first_, block);
}

TEST_F(HbmPoolTest, FreeChunksMoveToWhereMemoryIsNeeded) {
  auto pool = make(8_MiB, 1_MiB);
  const Block activation = *pool->allocate(first_, 8_MiB, Pool::kActivation);
  pool->free(first_, activation);
  auto weights = pool->allocate(first_, 8_MiB, Pool::kWeights);
  ASSERT_TRUE(weights) << "memory freed by activations serves weights";
  EXPECT_LE(device_in_use(), 8_MiB);
  pool->free(first_, *weights);
}

TEST_F(HbmPoolTest, TrimGivesFreeMemoryBackToTheDevice) {
  auto pool = make(8_MiB, 1_MiB);
  const Block block = *pool->allocate(first_, 3_MiB, Pool::kActivation);
  const Block kept = *pool->allocate(first_, 10_KiB, Pool::kActivation);
  pool->free(first_, block);
  EXPECT_GE(pool->trim(), 2_MiB);
  EXPECT_LE(device_in_use(), 2_MiB);
  pool->free(first_, kept);
}

TEST_F(HbmPoolTest, ALoweredBudgetBindsFromThenOn) {
  auto pool = make(8_MiB, 1_MiB);
  const Block block = *pool->allocate(first_, 6_MiB, Pool::kActivation);
  EXPECT_EQ(pool->set_budget(4_MiB), 2_MiB);
  EXPECT_FALSE(pool->allocate(first_, 1_MiB, Pool::kActivation));
  pool->free(first_, block);
  EXPECT_EQ(pool->set_budget(4_MiB), 0_B);
  EXPECT_LE(device_in_use(), 4_MiB);
}

TEST_F(HbmPoolTest, FindsTheBlockOfAnInteriorAddress) {
  auto pool = make(8_MiB);
  const Block block = *pool->allocate(first_, 100_KiB, Pool::kExpert);
  EXPECT_EQ(pool->find(block.address + 1000)->address, block.address);
  pool->free(first_, block);
  EXPECT_FALSE(pool->find(block.address + 1000).has_value());
}

TEST_F(HbmPoolTest, ZeroBytesAreABlockAndAbsurdSizesAreRefused) {
  auto pool = make(8_MiB);
  const Block nothing = *pool->allocate(first_, 0_B, Pool::kScratch);
  EXPECT_NE(nothing.address, nullptr);
  EXPECT_EQ(pool->allocate(first_, Bytes(1ULL << 60), Pool::kScratch).error().code, Errc::kOutOfBudget);
  pool->free(first_, nothing);
}

TEST_F(HbmPoolTest, ABadChunkIsRefused) {
  auto pool = HbmPool::create(*device_, {.budget = 8_MiB, .chunk = 1000_B});
  ASSERT_FALSE(pool);
  EXPECT_EQ(pool.error().code, Errc::kInvalidArgument);
}

TEST_F(HbmPoolTest, FreeingTwiceIsCaught) {
  auto pool = make(8_MiB);
  const Block block = *pool->allocate(first_, 1_KiB, Pool::kScratch);
  pool->free(first_, block);
  EXPECT_DEATH(pool->free(first_, block), "only a live block is freed");
}

}  // namespace
}  // namespace terrace
