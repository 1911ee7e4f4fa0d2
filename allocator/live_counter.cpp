#include "allocator/live_counter.hpp"

#include <algorithm>

namespace terrace {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

void raise(std::atomic<std::int64_t>& most, std::int64_t to) {
  std::int64_t now = most.load(kRelaxed);
  while (now < to && !most.compare_exchange_weak(now, to, kRelaxed)) {
  }
}

}  // namespace

void PublishedLive::change(std::int64_t by) {
  const std::int64_t now = now_.fetch_add(by, kRelaxed) + by;
  if (by <= 0) return;
  raise(peak_, now);
  raise(watermark_, now);
}

LiveCounter::LiveCounter(PublishedLive& published) : published_(&published), slack_(published.slack()) {
  set_marks();
}

void LiveCounter::set_marks() {
  const std::int64_t published = published_level_.load(kRelaxed);
  high_.store(std::min({published, peak_.load(kRelaxed), watermark_.load(kRelaxed)}), kRelaxed);
  low_.store(published - slack_, kRelaxed);
}

void LiveCounter::publish(std::int64_t level) {
  published_->change(level - published_level_.load(kRelaxed));
  published_level_.store(level, kRelaxed);
}

void LiveCounter::note(std::uint64_t bytes, Change change) {
  const std::int64_t live = live_.load(kRelaxed);
  const std::int64_t published = published_level_.load(kRelaxed);
  if (change == Change::kAdded) {
    if (live > peak_.load(kRelaxed)) peak_.store(live, kRelaxed);
    if (live > watermark_.load(kRelaxed)) watermark_.store(live, kRelaxed);
    // A little ahead, so that a thread that fills memory does not publish every block.
    if (live > published) publish(live + slack_ / 8);
  } else {
    slack_ = std::max({slack_, published_->slack(), static_cast<std::int64_t>(2 * bytes)});
    if (live < published - slack_) publish(live + slack_ / 2);
  }
  set_marks();
}

void LiveCounter::absorb(LiveCounter& other) {
  const auto move = [](Count& target, Count& source) { change(target, source.exchange(0, kRelaxed)); };
  for (std::size_t pool = 0; pool < kPoolCount; ++pool) move(by_pool_[pool], other.by_pool_[pool]);
  move(live_, other.live_);
  move(peak_, other.peak_);
  move(watermark_, other.watermark_);
  move(published_level_, other.published_level_);
  publish(live_.load(kRelaxed));
  set_marks();
}

void LiveTotals::include(LiveCounter& counter) {
  for (std::size_t pool = 0; pool < kPoolCount; ++pool)
    by_pool_[pool] += counter.by_pool_[pool].load(kRelaxed);
  live_ += counter.live_.load(kRelaxed);
  peak_ += counter.peak_.load(kRelaxed);
  watermark_ += counter.watermark_.load(kRelaxed);
}

Bytes LiveTotals::bounded(std::int64_t of_threads, const std::atomic<std::int64_t>& published) const {
  return bytes(std::max(std::min(of_threads, published.load(kRelaxed)), live_));
}

void LiveTotals::fill(PoolUsage& usage) const {
  usage.live = live();
  usage.live_peak = bounded(peak_, published_->peak_);
  usage.watermark = bounded(watermark_, published_->watermark_);
  for (std::size_t pool = 0; pool < kPoolCount; ++pool)
    usage.live_by_pool[pool] = live(static_cast<Pool>(pool));
}

void LiveTotals::restart_published(Since since) {
  auto& level = since == Since::kPeak ? published_->peak_ : published_->watermark_;
  level.store(published_->now_.load(kRelaxed), kRelaxed);
}

void LiveTotals::restart(LiveCounter& counter, Since since) {
  auto& peak = since == Since::kPeak ? counter.peak_ : counter.watermark_;
  peak.store(counter.live_.load(kRelaxed), kRelaxed);
  counter.set_marks();
}

}  // namespace terrace
