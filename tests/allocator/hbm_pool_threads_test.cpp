// The pool under many threads: caches that threads leave behind, pools that go before them, forks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <random>
#include <semaphore>
#include <thread>
#include <vector>

#include "allocator/cache_registry.hpp"
#include "allocator/hbm_pool.hpp"

namespace terrace {
namespace {

class HbmPoolThreadsTest : public testing::Test {
 protected:
  HbmPoolThreadsTest() : device_(std::move(open_emulated_device({.capacity = 128_MiB})).value()) {
    for (Stream& stream : streams_) stream = *device_->create_stream(StreamPriority::kNormal);
    pool_ = make(64_MiB);
  }
  ~HbmPoolThreadsTest() override {
    pool_.reset();
    for (const Stream stream : streams_) device_->destroy_stream(stream);
    EXPECT_EQ(device_->memory()->free, device_->memory()->total);
  }
  std::unique_ptr<HbmPool> make(Bytes budget) {
    return std::move(HbmPool::create(*device_, {.budget = budget})).value();
  }
  void expect_whole() {
    const auto walked = pool_->walk();
    EXPECT_TRUE(walked) << walked.error().text;
  }

  std::unique_ptr<Device> device_;
  std::array<Stream, 2> streams_;
  std::unique_ptr<HbmPool> pool_;
};

TEST_F(HbmPoolThreadsTest, WhatAThreadCachedIsThereForOthersWhenItEnds) {
  std::thread([&] {
    std::vector<Block> blocks;
    for (int i = 0; i < 40; ++i) blocks.push_back(*pool_->allocate(streams_[0], 4_KiB, Pool::kScratch));
    for (const Block& block : blocks) ASSERT_TRUE(pool_->free(streams_[0], block));
    EXPECT_GT(pool_->walk()->cached, 0_B);
  }).join();
  EXPECT_EQ(pool_->walk()->cached, 0_B);
  EXPECT_EQ(pool_->usage().live, 0_B);
}

TEST_F(HbmPoolThreadsTest, AnotherThreadsCacheIsNoReasonToRefuse) {
  std::binary_semaphore cached(0), done(0);
  std::jthread holder([&] {
    std::vector<Block> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(*pool_->allocate(streams_[0], 1_MiB, Pool::kActivation));
    for (const Block& block : blocks) ASSERT_TRUE(pool_->free(streams_[0], block));
    cached.release();
    done.acquire();
    // Its cache was emptied under it; it goes on.
    ASSERT_TRUE(pool_->free(streams_[0], *pool_->allocate(streams_[0], 1_KiB, Pool::kActivation)));
  });
  cached.acquire();
  EXPECT_GT(pool_->walk()->cached, 0_B);
  const auto all = pool_->allocate(streams_[1], 64_MiB, Pool::kActivation);
  ASSERT_TRUE(all) << all.error().text;
  ASSERT_TRUE(pool_->free_completed(*all));
  done.release();
  holder.join();
  expect_whole();
}

TEST_F(HbmPoolThreadsTest, ThePoolMayGoBeforeTheThreadsThatUsedIt) {
  std::binary_semaphore cached(0), gone(0);
  std::jthread user([&] {
    ASSERT_TRUE(pool_->free(streams_[0], *pool_->allocate(streams_[0], 1_KiB, Pool::kScratch)));
    cached.release();
    gone.acquire();
    // A new pool may stand in the old one's slot: the old cache is not used for it.
    auto next = make(4_MiB);
    ASSERT_TRUE(next->free(streams_[0], *next->allocate(streams_[0], 1_KiB, Pool::kScratch)));
    EXPECT_TRUE(next->walk());
  });
  cached.acquire();
  pool_.reset();
  gone.release();
}

TEST_F(HbmPoolThreadsTest, ThreadsEndWhilePoolsGo) {
  for (int round = 0; round < 50; ++round) {
    auto pool = make(4_MiB);
    std::vector<std::thread> threads;
    std::atomic<int> used{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        const Block block = *pool->allocate(streams_[0], 2_KiB, Pool::kScratch);
        ASSERT_TRUE(pool->free(streams_[0], block));
        ++used;  // and ends, while the pool may be going
      });
    }
    while (used.load() < 3) std::this_thread::yield();
    pool.reset();
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_F(HbmPoolThreadsTest, PoolsBeyondTheSlotsDoWithoutCaches) {
  std::vector<std::unique_ptr<HbmPool>> pools;
  for (std::size_t i = 0; i < kCacheSlots + 3; ++i) pools.push_back(make(1_MiB));
  for (auto& pool : pools) {
    const Block block = *pool->allocate(streams_[0], 3_KiB, Pool::kScratch);
    EXPECT_EQ(pool->usage().live, 3_KiB);
    ASSERT_TRUE(pool->free(streams_[0], block));
    EXPECT_FALSE(pool->free(streams_[0], block));
    EXPECT_EQ(pool->usage().live_peak, 3_KiB);
    EXPECT_TRUE(pool->walk());
  }
  EXPECT_EQ(pools.back()->walk()->cached, 0_B);
  EXPECT_GT(pools.front()->walk()->cached, 0_B);
}

// A queue of blocks: one thread takes them on one stream, another gives them back on its own.
TEST_F(HbmPoolThreadsTest, BlocksAreFreedByOtherThreadsOnOtherStreams) {
  std::mutex mutex;
  std::condition_variable more;
  std::deque<Block> queue;
  std::jthread consumer([&] {
    for (int i = 0; i < 20'000; ++i) {
      std::unique_lock lock(mutex);
      more.wait(lock, [&] { return !queue.empty(); });
      const Block block = queue.front();
      queue.pop_front();
      lock.unlock();
      ASSERT_EQ(pool_->find(block.address + block.size.count() / 2)->address, block.address);
      ASSERT_TRUE(pool_->free(streams_[static_cast<std::size_t>(i) % 2], block));
    }
  });
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    auto block = pool_->allocate(streams_[0], Bytes(1 + random() % 50'000), Pool::kActivation);
    while (!block) block = pool_->allocate(streams_[0], 1_KiB, Pool::kActivation);
    const std::lock_guard lock(mutex);
    queue.push_back(*block);
    more.notify_one();
  }
  consumer.join();
  EXPECT_EQ(pool_->usage().live, 0_B);
  expect_whole();
}

TEST_F(HbmPoolThreadsTest, TheBudgetGrowsAndShrinksUnderUse) {
  std::atomic<bool> stop{false};
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<Block> held;
      const Stream stream = streams_[t % 2];
      while (!stop.load()) {
        auto block = pool_->allocate(stream, Bytes(1 + random() % 400'000), static_cast<Pool>(random() % 7));
        if (block) held.push_back(*block);
        if (!block || held.size() > 60) {
          for (const Block& freed : held) ASSERT_TRUE(pool_->free(stream, freed));
          held.clear();
        }
      }
      for (const Block& freed : held) ASSERT_TRUE(pool_->free(stream, freed));
    });
  }
  for (int i = 0; i < 60; ++i) {
    const Bytes budget = (i % 2 == 0 ? 6_MiB : 48_MiB);
    const Bytes over = pool_->set_budget(budget);
    const PoolUsage usage = pool_->usage();
    EXPECT_LE(usage.mapped, budget + over);
    const auto walked = pool_->walk();
    ASSERT_TRUE(walked) << walked.error().text;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  stop = true;
  threads.clear();
  EXPECT_EQ(pool_->set_budget(2_MiB), 0_B);
  EXPECT_LE(pool_->usage().mapped, 2_MiB);
}

TEST_F(HbmPoolThreadsTest, AChildOfForkIsRefusedAndNeverHangs) {
  std::atomic<bool> stop{false};
  std::vector<std::jthread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!stop.load()) {
        ASSERT_TRUE(pool_->free(streams_[0], *pool_->allocate(streams_[0], 100_KiB, Pool::kScratch)));
        (void)pool_->trim();
      }
    });
  }
  const Block held = *pool_->allocate(streams_[0], 1_KiB, Pool::kScratch);
  for (int i = 0; i < 10; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto refused = pool_->allocate(streams_[0], 1_KiB, Pool::kScratch);
      bool fine = !refused && refused.error().code == Errc::kNotSupported;
      fine &= !pool_->free(streams_[0], held);
      fine &= pool_->find(held.address).has_value() && pool_->trim() == 0_B && !pool_->walk();
      (void)pool_->usage();
      (void)pool_->take_watermark();
      pool_.reset();
      _exit(fine ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  stop = true;
  threads.clear();
  EXPECT_TRUE(pool_->free(streams_[0], held)) << "the parent goes on";
  expect_whole();
}

}  // namespace
}  // namespace terrace
