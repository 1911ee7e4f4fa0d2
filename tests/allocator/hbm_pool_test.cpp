#include "allocator/hbm_pool.hpp"

#include <gtest/gtest.h>

#include <algorithm>
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
  for (const Block& block : blocks) EXPECT_TRUE(pool->free(first_, block));
  EXPECT_EQ(pool->usage().live, 0_B);
}

TEST_F(HbmPoolTest, AFreedBlockServesTheSameStreamAtOnce) {
  auto pool = make(8_MiB);
  const Block block = *pool->allocate(first_, 1_MiB, Pool::kScratch);
  EXPECT_TRUE(pool->free(first_, block));
  const Block again = *pool->allocate(first_, 1_MiB, Pool::kScratch);
  EXPECT_EQ(again.address, block.address);
  EXPECT_TRUE(pool->free(first_, again));
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
  EXPECT_TRUE(pool->free(first_, block));
  const Block again = *pool->allocate(second_, 1_MiB, Pool::kScratch);
  EXPECT_EQ(again.address, block.address);
  ASSERT_TRUE(
      device_->launch_host(second_, [&] { EXPECT_EQ(order.fetch_add(1), 1) << "ran before the free"; }));
  gate.release();
  ASSERT_TRUE(device_->synchronize(second_));
  EXPECT_TRUE(pool->free(second_, again));
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
  for (const Block& block : activations) EXPECT_TRUE(pool->free(first_, block));
  for (const Block& block : weights) EXPECT_TRUE(pool->free(first_, block));
}

TEST_F(HbmPoolTest, FreeChunksMoveToWhereMemoryIsNeeded) {
  auto pool = make(8_MiB, 1_MiB);
  const Block activation = *pool->allocate(first_, 8_MiB, Pool::kActivation);
  EXPECT_TRUE(pool->free(first_, activation));
  auto weights = pool->allocate(first_, 8_MiB, Pool::kWeights);
  ASSERT_TRUE(weights) << "memory freed by activations serves weights";
  EXPECT_LE(device_in_use(), 8_MiB);
  EXPECT_TRUE(pool->free(first_, *weights));
}

TEST_F(HbmPoolTest, TrimGivesFreeMemoryBackToTheDevice) {
  auto pool = make(8_MiB, 1_MiB);
  const Block block = *pool->allocate(first_, 3_MiB, Pool::kActivation);
  const Block kept = *pool->allocate(first_, 10_KiB, Pool::kActivation);
  EXPECT_TRUE(pool->free(first_, block));
  EXPECT_GE(pool->trim(), 2_MiB);
  EXPECT_LE(device_in_use(), 2_MiB);
  EXPECT_TRUE(pool->free(first_, kept));
}

TEST_F(HbmPoolTest, ALoweredBudgetBindsFromThenOn) {
  auto pool = make(8_MiB, 1_MiB);
  const Block block = *pool->allocate(first_, 6_MiB, Pool::kActivation);
  EXPECT_EQ(pool->set_budget(4_MiB), 2_MiB);
  EXPECT_FALSE(pool->allocate(first_, 1_MiB, Pool::kActivation));
  EXPECT_TRUE(pool->free(first_, block));
  EXPECT_EQ(pool->set_budget(4_MiB), 0_B);
  EXPECT_LE(device_in_use(), 4_MiB);
}

TEST_F(HbmPoolTest, FindsTheBlockOfAnInteriorAddress) {
  auto pool = make(8_MiB);
  const Block block = *pool->allocate(first_, 100_KiB, Pool::kExpert);
  EXPECT_EQ(pool->find(block.address + 1000)->address, block.address);
  EXPECT_TRUE(pool->free(first_, block));
  EXPECT_FALSE(pool->find(block.address + 1000).has_value());
}

TEST_F(HbmPoolTest, ZeroBytesAreABlockAndAbsurdSizesAreRefused) {
  auto pool = make(8_MiB);
  const Block nothing = *pool->allocate(first_, 0_B, Pool::kScratch);
  EXPECT_NE(nothing.address, nullptr);
  EXPECT_EQ(pool->usage().live, 512_B) << "it counts as one byte";
  EXPECT_EQ(pool->find(nothing.address)->size, 1_B);
  for (const std::uint64_t size : {1ULL << 60, 1ULL << 63, ~0ULL, ~0ULL - 511, ~0ULL - 512, 1ULL << 44}) {
    const auto refused = pool->allocate(first_, Bytes(size), Pool::kScratch);
    ASSERT_FALSE(refused) << size;
    EXPECT_EQ(refused.error().code, Errc::kOutOfBudget) << size;
  }
  EXPECT_EQ(pool->usage().live, 512_B);
  EXPECT_EQ(pool->usage().mapped, 64_KiB);
  EXPECT_TRUE(pool->free(first_, nothing));
}

TEST_F(HbmPoolTest, AlignmentIsAPowerOfTwoUpToTheChunk) {
  auto pool = make(16_MiB, 1_MiB);
  std::vector<Block> held;
  for (const Bytes alignment : {1_B, 512_B, 1_KiB, 64_KiB, 1_MiB}) {
    for (const Bytes size : {700_B, 100_KiB}) {
      const auto block = pool->allocate(first_, size, Pool::kActivation, {.alignment = alignment});
      ASSERT_TRUE(block) << block.error().text;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block->address) % alignment.count(), 0U);
      held.push_back(*block);
    }
  }
  for (const std::uint64_t alignment : {0ULL, 3ULL, 513ULL, 2ULL << 20, ~0ULL}) {
    const auto refused = pool->allocate(first_, 1_KiB, Pool::kActivation, {.alignment = Bytes(alignment)});
    ASSERT_FALSE(refused) << alignment;
    EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
  }
  const auto walked = pool->walk();
  EXPECT_TRUE(walked) << walked.error().text;
  for (const Block& block : held) EXPECT_TRUE(pool->free(first_, block));
}

TEST_F(HbmPoolTest, ABadChunkIsRefused) {
  auto pool = HbmPool::create(*device_, {.budget = 8_MiB, .chunk = 1000_B});
  ASSERT_FALSE(pool);
  EXPECT_EQ(pool.error().code, Errc::kInvalidArgument);
}

TEST_F(HbmPoolTest, WhatIsNoLiveBlockIsNotFreed) {
  auto pool = make(8_MiB);
  auto other = make(8_MiB);
  for (const Bytes size : {1_KiB, 100_KiB, 2_MiB}) {
    const Block block = *pool->allocate(first_, size, Pool::kScratch);
    const Block kept = *pool->allocate(first_, size, Pool::kScratch);
    const Block foreign = *other->allocate(first_, size, Pool::kScratch);
    std::byte on_the_stack{};
    ASSERT_TRUE(pool->free(first_, block));
    const std::vector<std::pair<Address, const char*>> bad = {
        {block.address, "freed already"},           {kept.address + 512, "512 bytes inside the block"},
        {kept.address + 1, "1 bytes inside"},       {foreign.address, "no address of this pool"},
        {&on_the_stack, "no address of this pool"}, {nullptr, "no address of this pool"}};
    for (const auto& [address, why] : bad) {
      for (const Status& refused : {pool->free(first_, {address, size, Pool::kScratch}),
                                    pool->free_completed({address, size, Pool::kScratch})}) {
        ASSERT_FALSE(refused) << why;
        EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
        EXPECT_NE(refused.error().text.find(why), std::string::npos) << refused.error().text;
      }
    }
    (void)pool->trim();
    EXPECT_FALSE(pool->free(first_, block)) << "also when its memory is gone";
    EXPECT_EQ(pool->usage().live, round_up(size, 512_B));
    EXPECT_TRUE(pool->walk());
    EXPECT_TRUE(pool->free(first_, kept));
    EXPECT_TRUE(other->free(first_, foreign));
  }
}

TEST_F(HbmPoolTest, AStreamThatEndedHasPassedEveryPoint) {
  auto pool = make(4_MiB, 1_MiB);
  const Stream gone = *device_->create_stream(StreamPriority::kNormal);
  const Block small = *pool->allocate(gone, 4_KiB, Pool::kScratch);
  const Block large = *pool->allocate(gone, 1_MiB, Pool::kScratch);
  const Block cached = *pool->allocate(gone, 1_MiB, Pool::kScratch);
  EXPECT_TRUE(pool->free(gone, cached));
  device_->destroy_stream(gone);
  EXPECT_TRUE(pool->free(gone, small));
  EXPECT_TRUE(pool->free(gone, large));
  EXPECT_EQ(pool->usage().live, 0_B);
  for (const Bytes size : {4_KiB, 1_MiB}) {
    const auto refused = pool->allocate(gone, size, Pool::kScratch);
    ASSERT_FALSE(refused) << "its cached blocks are no reason to serve it";
    EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
  }
  EXPECT_EQ(pool->allocate(Stream{}, 4_KiB, Pool::kScratch).error().code, Errc::kInvalidArgument);
  const Block all = *pool->allocate(second_, 3_MiB, Pool::kScratch);
  EXPECT_TRUE(pool->free(second_, all));
}

TEST_F(HbmPoolTest, AHundredStreamsTakeTurns) {
  auto pool = make(32_MiB, 1_MiB);
  for (int i = 0; i < 100; ++i) {
    const Stream stream = *device_->create_stream(StreamPriority::kNormal);
    const Block block = *pool->allocate(stream, 10_KiB, Pool::kScratch);
    EXPECT_TRUE(pool->free(stream, block));
    device_->destroy_stream(stream);
  }
  EXPECT_TRUE(pool->walk());
}

TEST_F(HbmPoolTest, TooManyStreamsAreAnErrorAndNotTheEnd) {
  auto pool = make(32_MiB, 1_MiB);
  std::binary_semaphore gate(0);
  std::vector<Stream> streams;
  std::vector<Block> blocks;
  for (int i = 0; i < 65; ++i) {
    streams.push_back(*device_->create_stream(StreamPriority::kNormal));
    if (i == 0) {
      ASSERT_TRUE(device_->launch_host(streams[0], [&] { gate.acquire(); }));
    } else {
      // All of them stand behind the gate of the first.
      const Event behind = *device_->create_event();
      ASSERT_TRUE(device_->record(streams[0], behind));
      ASSERT_TRUE(device_->wait(streams.back(), behind));
      device_->destroy_event(behind);
    }
    auto block = pool->allocate(streams.back(), 8_KiB, Pool::kScratch);
    if (i == 64) {
      ASSERT_FALSE(block);
      EXPECT_EQ(block.error().code, Errc::kOutOfMemory);
      break;
    }
    ASSERT_TRUE(block) << block.error().text;
    blocks.push_back(*block);
    // In the order and not in a cache: pending, and in nobody's lane.
    ASSERT_TRUE(pool->free(streams.back(), blocks.back()));
  }
  gate.release();
  for (const Stream stream : streams) ASSERT_TRUE(device_->synchronize(stream));
  // Their fences have been passed, or are in a moment.
  auto block = pool->allocate(streams.back(), 8_KiB, Pool::kScratch);
  while (!block) block = pool->allocate(streams.back(), 8_KiB, Pool::kScratch);
  ASSERT_TRUE(pool->free(streams.back(), *block));
  pool.reset();
  for (const Stream stream : streams) device_->destroy_stream(stream);
}

TEST_F(HbmPoolTest, SmallBlocksNeverSitBetweenLargeOnes) {
  auto pool = make(16_MiB, 1_MiB);
  std::vector<Block> small, large;
  for (int i = 0; i < 20; ++i) {
    small.push_back(*pool->allocate(first_, 3_KiB, Pool::kActivation));
    large.push_back(*pool->allocate(first_, 300_KiB, Pool::kActivation));
  }
  const auto [low, high] =
      std::minmax_element(large.begin(), large.end(), [](auto& a, auto& b) { return a.address < b.address; });
  for (const Block& block : small) {
    EXPECT_TRUE(block.address < low->address || block.address > high->address);
    EXPECT_TRUE(pool->free(first_, block));
  }
  for (const Block& block : large) EXPECT_TRUE(pool->free(first_, block));
}

TEST_F(HbmPoolTest, CachesCostNeitherAChunkNorARefusal) {
  auto pool = make(8_MiB, 1_MiB);
  std::vector<Block> blocks;
  for (int i = 0; i < 64; ++i) blocks.push_back(*pool->allocate(first_, 64_KiB, Pool::kActivation));
  EXPECT_EQ(pool->usage().mapped, 4_MiB);
  for (const Block& block : blocks) EXPECT_TRUE(pool->free(first_, block));
  EXPECT_GT(pool->walk()->cached, 0_B);
  const Block whole = *pool->allocate(first_, 4_MiB, Pool::kActivation);
  EXPECT_EQ(pool->usage().mapped, 4_MiB) << "what lay in the cache was used";
  EXPECT_TRUE(pool->free(first_, whole));
  const Block all = *pool->allocate(second_, 8_MiB, Pool::kActivation);
  EXPECT_TRUE(pool->free(second_, all));
}

TEST_F(HbmPoolTest, NothingSmallIsWastedOnRounding) {
  auto pool = make(16_MiB);
  std::vector<Block> held;
  Bytes asked;
  for (const std::uint64_t size : {1ULL, 513ULL, 33'000ULL, 1'000'001ULL, 5'000'000ULL}) {
    held.push_back(*pool->allocate(first_, Bytes(size), Pool::kActivation));
    asked += Bytes(size);
  }
  EXPECT_LT(pool->usage().live, asked + 512_B * held.size());
  for (const Block& block : held) EXPECT_TRUE(pool->free(first_, block));
}

TEST_F(HbmPoolTest, WatermarksAndPeaksAreExactForOneThread) {
  auto pool = make(32_MiB);
  const Block kept = *pool->allocate(first_, 1_MiB, Pool::kWeights);
  pool->take_watermark();
  for (int i = 0; i < 10; ++i) {
    const Block a = *pool->allocate(first_, 2_MiB, Pool::kActivation);
    const Block b = *pool->allocate(second_, 3_KiB, Pool::kScratch);
    ASSERT_TRUE(pool->free(first_, a));
    ASSERT_TRUE(pool->free(second_, b));
    EXPECT_EQ(pool->take_watermark(), 3_MiB + 3_KiB) << i;
  }
  EXPECT_EQ(pool->take_watermark(), 1_MiB);
  EXPECT_EQ(pool->usage().live_peak, 3_MiB + 3_KiB);
  pool->reset_peaks();
  EXPECT_EQ(pool->usage().live_peak, 1_MiB);
  EXPECT_TRUE(pool->free_completed(kept));
}

TEST_F(HbmPoolTest, AMixedHeapWalksClean) {
  auto pool = make(16_MiB, 1_MiB);
  std::vector<Block> held;
  for (int i = 0; i < 200; ++i) {
    held.push_back(*pool->allocate(first_, Bytes(1 + static_cast<std::uint64_t>(i) * 97), Pool::kGradient));
    if (i % 3 == 0) {
      ASSERT_TRUE(pool->free(second_, held[static_cast<std::size_t>(i)]));
    }
  }
  const auto walked = pool->walk();
  ASSERT_TRUE(walked) << walked.error().text;
  EXPECT_EQ(walked->mapped, walked->live + walked->cached + walked->free);
  EXPECT_EQ(walked->live, pool->usage().live);
  EXPECT_EQ(walked->live_blocks, 133U);
  EXPECT_GT(walked->cached_blocks, 0U);
  for (std::size_t i = 0; i < held.size(); ++i) {
    if (i % 3 != 0) {
      ASSERT_TRUE(pool->free(first_, held[i]));
    }
  }
}

}  // namespace
}  // namespace terrace
