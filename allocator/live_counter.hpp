// How many bytes are live, counted without a shared cache line.
//
// Each thread adds and subtracts in counters of its own; a reader sums them. What is live is exact whenever
// no call is under way (a block may be freed by another thread than took it, so one thread's share may be
// negative). A peak is the lesser of two upper bounds:
//   - the sum of the threads' own peaks: exact while one thread allocates and frees;
//   - the peak of what threads have published. A thread publishes when its share rises above what it has
//     published, and takes back what it no longer holds only past a slack, so that taking and freeing the
//     same block touches nothing shared. This bound is off by at most a slack a thread: budget/256, or twice
//     the largest block the thread has freed where that is more.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "allocator/pool_usage.hpp"

namespace terrace {

// What all threads have published.
class PublishedLive {
 public:
  explicit PublishedLive(Bytes budget) { set_budget(budget); }
  void set_budget(Bytes budget) {
    slack_.store(static_cast<std::int64_t>(budget.count() / 256), std::memory_order_relaxed);
  }
  void change(std::int64_t by);
  [[nodiscard]] std::int64_t slack() const { return slack_.load(std::memory_order_relaxed); }

 private:
  friend class LiveTotals;
  std::atomic<std::int64_t> now_{0};
  std::atomic<std::int64_t> peak_{0};
  std::atomic<std::int64_t> watermark_{0};  // the peak since another moment
  std::atomic<std::int64_t> slack_{0};
};

// One thread's share. Written by its thread, or by the holder of the pool's lock while that thread is
// stopped; read by anyone.
class LiveCounter {
 public:
  explicit LiveCounter(PublishedLive& published);

  // Both say whether that was all; false: note() has to look at it.
  [[nodiscard, gnu::always_inline]] bool add(Pool pool, std::uint64_t bytes) {
    return change(pool, static_cast<std::int64_t>(bytes)) <= high_.load(kRelaxed);
  }
  [[nodiscard, gnu::always_inline]] bool remove(Pool pool, std::uint64_t bytes) {
    return change(pool, -static_cast<std::int64_t>(bytes)) >= low_.load(kRelaxed);
  }
  enum class Change : std::uint8_t { kAdded, kRemoved };
  void note(std::uint64_t bytes, Change change);
  // Moves what `other` counts into this one: its thread has gone.
  void absorb(LiveCounter& other);

 private:
  friend class LiveTotals;
  using Count = std::atomic<std::int64_t>;
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  [[gnu::always_inline]] static std::int64_t change(Count& count, std::int64_t by) {
    const std::int64_t now = count.load(kRelaxed) + by;
    count.store(now, kRelaxed);
    return now;
  }
  [[gnu::always_inline]] std::int64_t change(Pool pool, std::int64_t by) {
    change(by_pool_[static_cast<std::size_t>(pool)], by);
    return change(live_, by);
  }
  void publish(std::int64_t level);
  void set_marks();

  // These are all that a block taken or freed touches.
  std::array<Count, kPoolCount> by_pool_{};
  Count live_{0};
  Count high_{0};  // above it something must be noted: the least of published and the two peaks
  Count low_{0};   // below it some of what is published is taken back

  Count published_level_{0};
  Count peak_{0};
  Count watermark_{0};
  PublishedLive* published_;
  std::int64_t slack_ = 0;
};

// Sums over the counters of one pool. Reading is safe at any time; the restarts need every thread stopped.
class LiveTotals {
 public:
  explicit LiveTotals(PublishedLive& published) : published_(&published) {}
  void include(LiveCounter& counter);
  [[nodiscard]] Bytes live() const { return bytes(live_); }
  [[nodiscard]] Bytes live(Pool pool) const { return bytes(by_pool_[static_cast<std::size_t>(pool)]); }
  // Fills in live, its peak and the watermark.
  void fill(PoolUsage& usage) const;

  enum class Since : std::uint8_t { kPeak, kWatermark };
  // Starts the peak, or the watermark, again from what is live: this once, then each counter.
  void restart_published(Since since);
  static void restart(LiveCounter& counter, Since since);

 private:
  [[nodiscard]] static Bytes bytes(std::int64_t count) {
    return Bytes(count > 0 ? static_cast<std::uint64_t>(count) : 0);
  }
  [[nodiscard]] Bytes bounded(std::int64_t of_threads, const std::atomic<std::int64_t>& published) const;

  std::array<std::int64_t, kPoolCount> by_pool_{};
  std::int64_t live_ = 0;
  std::int64_t peak_ = 0;
  std::int64_t watermark_ = 0;
  PublishedLive* published_;
};

}  // namespace terrace
