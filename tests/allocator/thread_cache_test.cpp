#include "allocator/thread_cache.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace terrace {
namespace {

using Outcome = ThreadCache::Outcome;

class ThreadCacheTest : public testing::Test {
 protected:
  ThreadCacheTest()
      : device_(std::move(open_emulated_device({.capacity = 1_MiB})).value()),
        base_(*device_->reserve(kSize)),
        table_(std::move(BlockTable::create(base_, kSize)).value()),
        published_(1_GiB),
        cache_(*device_, table_, published_, {.budget = 1_GiB}) {
    EXPECT_TRUE(table_.open(base_, kSize));
    cache_.set_lane(0, kStream, Lifetime::kShort, 0);
    (void)cache_.use_lane(kStream, Pool::kActivation);
  }
  ~ThreadCacheTest() override { device_->release(base_, kSize); }

  static constexpr Stream kStream{7};
  static constexpr Stream kOther{7 + 8};  // in the same place
  static constexpr Bytes kSize{1ULL << 32};

  // A live block, placed as a pool would.
  Block live(Bytes size) {
    const Block block{base_ + next_, size, Pool::kActivation};
    next_ += round_up(size, kUnit).count();
    table_.place(block.address, BlockWord::live(size, block.pool, {}));
    return block;
  }
  Outcome put(const Block& block) {
    ThreadCache::Found found;
    if (!cache_.find_plain(block, found)) return Outcome::kMiss;
    if (!ThreadCache::is_small(block.size))
      cache_.claim_bin(*cache_.use_lane(kStream, block.pool), found.units);
    return ThreadCache::is_small(block.size) ? cache_.put_small(kStream, found)
                                             : cache_.put_large(kStream, found);
  }
  Address take(Bytes size, Stream stream = kStream, Pool pool = Pool::kActivation) {
    Address at = nullptr;
    const auto outcome = ThreadCache::is_small(size) ? cache_.take_small(stream, size, pool, {}, at)
                                                     : cache_.take_large(stream, size, pool, {}, at);
    return outcome == Outcome::kMiss ? nullptr : at;
  }

  std::unique_ptr<Device> device_;
  Address base_;
  BlockTable table_;
  PublishedLive published_;
  ThreadCache cache_;
  std::uint64_t next_ = 0;
};

TEST_F(ThreadCacheTest, LifetimesAreThoseOfTheRanges) {
  for (const Pool pool : {Pool::kWeights, Pool::kOptimizer, Pool::kGradient, Pool::kComm}) {
    EXPECT_EQ(lifetime_of(pool), Lifetime::kLong) << name_of(pool);
  }
  for (const Pool pool : {Pool::kActivation, Pool::kExpert, Pool::kScratch}) {
    EXPECT_EQ(lifetime_of(pool), Lifetime::kShort) << name_of(pool);
  }
}

TEST_F(ThreadCacheTest, GivesBackWhatWasPutInByExactSizeAndStream) {
  for (const Bytes size : {2_KiB, 1_MiB}) {
    const Block block = live(size);
    ASSERT_NE(put(block), Outcome::kMiss);
    EXPECT_EQ(put(block), Outcome::kMiss) << "it is live no more";
    EXPECT_EQ(take(size + 512_B), nullptr);
    EXPECT_EQ(take(size, kOther), nullptr);
    EXPECT_EQ(take(size, kStream, Pool::kWeights), nullptr) << "of the other lifetime";
    EXPECT_EQ(take(size - 1_B), block.address) << "the same range, another size asked for";
    EXPECT_EQ(table_.find(block.address)->size, size - 1_B);
    EXPECT_EQ(take(size), nullptr);
  }
}

TEST_F(ThreadCacheTest, NothingIsTakenOnceAnyStreamHasEnded) {
  ASSERT_NE(put(live(2_KiB)), Outcome::kMiss);
  device_->destroy_stream(*device_->create_stream(StreamPriority::kNormal));
  EXPECT_EQ(take(2_KiB), nullptr);
  cache_.saw_streams_ended(device_->streams_ended());
  EXPECT_NE(take(2_KiB), nullptr);
}

TEST_F(ThreadCacheTest, LargeBlocksHoldAPartOfTheBudgetAtMost) {
  std::vector<Block> kept;
  for (int i = 0; i < 4; ++i) {
    const Block block = live(20_MiB);
    if (put(block) != Outcome::kMiss) kept.push_back(block);
  }
  EXPECT_EQ(kept.size(), 3U) << "a sixteenth of 1 GiB";
  std::size_t visited = 0;
  cache_.each_block([&](Address, std::uint64_t units) {
    ++visited;
    EXPECT_EQ(units, (20_MiB).count() >> kUnitShift);
  });
  EXPECT_EQ(visited, 3U);
  std::size_t emptied = 0;
  cache_.empty(*cache_.use_lane(kStream, Pool::kActivation), [&](Address) { ++emptied; });
  EXPECT_EQ(emptied, 3U);
}

TEST_F(ThreadCacheTest, LanesThatShareAPlaceAreBothFound) {
  cache_.set_lane(1, kOther, Lifetime::kShort, 1);
  ASSERT_NE(put(live(2_KiB)), Outcome::kMiss);
  EXPECT_NE(cache_.use_lane(kOther, Pool::kActivation), nullptr);
  EXPECT_EQ(take(2_KiB), nullptr) << "the place is the other's now";
  EXPECT_NE(cache_.use_lane(kStream, Pool::kActivation), nullptr);
  EXPECT_NE(take(2_KiB), nullptr);
  cache_.drop_lane(0);
  EXPECT_EQ(cache_.use_lane(kStream, Pool::kActivation), nullptr);
  EXPECT_EQ(cache_.lane_of(kStream, Pool::kActivation), nullptr);
}

}  // namespace
}  // namespace terrace
