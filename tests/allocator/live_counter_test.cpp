#include "allocator/live_counter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

namespace terrace {
namespace {

constexpr Bytes kBudget = 256_MiB;  // a slack of 1 MiB

PoolUsage usage_of(PublishedLive& published, std::vector<std::unique_ptr<LiveCounter>>& counters) {
  LiveTotals totals(published);
  for (auto& counter : counters) totals.include(*counter);
  PoolUsage usage;
  totals.fill(usage);
  return usage;
}

void add(LiveCounter& counter, Pool pool, std::uint64_t bytes) {
  if (!counter.add(pool, bytes)) counter.note(bytes, LiveCounter::Change::kAdded);
}
void remove(LiveCounter& counter, Pool pool, std::uint64_t bytes) {
  if (!counter.remove(pool, bytes)) counter.note(bytes, LiveCounter::Change::kRemoved);
}

void restart(PublishedLive& published, std::vector<std::unique_ptr<LiveCounter>>& counters,
             LiveTotals::Since since) {
  LiveTotals(published).restart_published(since);
  for (auto& counter : counters) LiveTotals::restart(*counter, since);
}

TEST(LiveCounter, IsExactForOneThread) {
  PublishedLive published(kBudget);
  std::vector<std::unique_ptr<LiveCounter>> counters;
  counters.push_back(std::make_unique<LiveCounter>(published));
  counters.push_back(std::make_unique<LiveCounter>(published));  // of a thread that does nothing
  std::mt19937 random(1);
  std::uint64_t live = 0, peak = 0, watermark = 0;
  std::vector<std::uint64_t> blocks;
  for (int i = 0; i < 20'000; ++i) {
    if (blocks.empty() || random() % 2 == 0) {
      blocks.push_back(512 * (1 + random() % 4000));
      add(*counters[0], Pool::kActivation, blocks.back());
      live += blocks.back();
      peak = std::max(peak, live);
      watermark = std::max(watermark, live);
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      remove(*counters[0], Pool::kActivation, blocks.back());
      live -= blocks.back();
      blocks.pop_back();
    }
    const PoolUsage usage = usage_of(published, counters);
    ASSERT_EQ(usage.live, Bytes(live));
    ASSERT_EQ(usage.live_by_pool[static_cast<std::size_t>(Pool::kActivation)], Bytes(live));
    ASSERT_EQ(usage.live_peak, Bytes(peak)) << i;
    ASSERT_EQ(usage.watermark, Bytes(watermark)) << i;
    if (random() % 500 == 0) {
      restart(published, counters, LiveTotals::Since::kWatermark);
      watermark = live;
    }
    if (random() % 5000 == 0) {
      restart(published, counters, LiveTotals::Since::kPeak);
      peak = live;
    }
  }
}

TEST(LiveCounter, IsAnUpperBoundWithinItsSlackForMany) {
  constexpr std::size_t kThreads = 4;
  PublishedLive published(kBudget);
  std::vector<std::unique_ptr<LiveCounter>> counters;
  for (std::size_t i = 0; i < kThreads; ++i) counters.push_back(std::make_unique<LiveCounter>(published));
  std::mt19937 random(2);
  std::int64_t live = 0, peak = 0;
  std::vector<std::uint64_t> blocks;
  for (int i = 0; i < 50'000; ++i) {
    // Any thread frees what any other took, so shares drift far from zero.
    if (blocks.size() < 20 || (blocks.size() < 400 && random() % 2 == 0)) {
      blocks.push_back(512 * (1 + random() % 400));
      add(*counters[random() % 2], Pool::kGradient, blocks.back());
      live += static_cast<std::int64_t>(blocks.back());
      peak = std::max(peak, live);
    } else {
      remove(*counters[random() % kThreads], Pool::kGradient, blocks.back());
      live -= static_cast<std::int64_t>(blocks.back());
      blocks.pop_back();
    }
  }
  const PoolUsage usage = usage_of(published, counters);
  EXPECT_EQ(usage.live, Bytes(static_cast<std::uint64_t>(live)));
  EXPECT_GE(usage.live_peak, Bytes(static_cast<std::uint64_t>(peak)));
  EXPECT_LE(usage.live_peak, Bytes(static_cast<std::uint64_t>(peak)) + 1_MiB * kThreads + 1_MiB);
  EXPECT_EQ(usage.live_by_pool[static_cast<std::size_t>(Pool::kGradient)], usage.live);
}

TEST(LiveCounter, AThreadThatEndsLeavesWhatItCounted) {
  PublishedLive published(kBudget);
  std::vector<std::unique_ptr<LiveCounter>> counters;
  counters.push_back(std::make_unique<LiveCounter>(published));
  {
    LiveCounter ended(published);
    add(ended, Pool::kWeights, 10 << 20);
    remove(ended, Pool::kWeights, 4 << 20);
    counters[0]->absorb(ended);
  }
  const PoolUsage usage = usage_of(published, counters);
  EXPECT_EQ(usage.live, 6_MiB);
  EXPECT_GE(usage.live_peak, 10_MiB);
  EXPECT_LE(usage.live_peak, 11_MiB);
}

}  // namespace
}  // namespace terrace
