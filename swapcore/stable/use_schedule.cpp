#include "swapcore/stable/use_schedule.hpp"

#include <algorithm>

namespace terrace {

namespace {
constexpr std::size_t kRun = 4;  // uses that are looked for in the past
}

void UseSchedule::use(std::uint32_t block) {
  if (!history_.empty() && history_.back() == block) return;
  history_.push_back(block);
  if (learned()) {
    follow(block);
  } else {
    look_for_period();
  }
  if (history_.size() >= 3 * options_.longest) shorten();
}

// How long ago the last few uses came in this order before; 0: never. A block alone would not do: one that is
// used twice in a step was used more recently than a step ago.
std::size_t UseSchedule::distance_of_last_run() {
  if (history_.size() < kRun) return 0;
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (std::size_t i = history_.size() - kRun; i < history_.size(); ++i) {
    hash = (hash ^ history_[i]) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 29;
  }
  const std::size_t now = history_.size() - 1;
  const auto [at, first_time] = last_run_.try_emplace(hash, now);
  const std::size_t distance = first_time ? 0 : now - at->second;
  at->second = now;
  return distance;
}

// A period is a distance at which use after use has agreed with the one so long before: for a whole period,
// or for as many as prove it where a period is shorter. Where that fails, the distance at which this point
// was reached before is tried next.
void UseSchedule::look_for_period() {
  const std::size_t now = history_.size() - 1, distance = distance_of_last_run();
  if (candidate_ > 0 && now >= candidate_ && history_[now - candidate_] == history_[now]) {
    ++agreed_;
    if (agreed_ >= std::max(candidate_, options_.proof)) learn(candidate_);
    return;
  }
  agreed_ = 0;
  candidate_ = distance > options_.longest ? 0 : distance;
}

void UseSchedule::learn(std::size_t period) {
  period_ = period;
  ++lessons_;
  cycle_.assign(history_.end() - static_cast<std::ptrdiff_t>(period), history_.end());
  places_.clear();
  for (std::size_t i = 0; i < period; ++i) places_[cycle_[i]].push_back(i);
  at_ = 0;
  lost_ = 0;
}

void UseSchedule::unlearn() {
  period_ = candidate_ = agreed_ = 0;
  last_run_.clear();  // of uses that were followed nothing was noted
  cycle_.clear();
  places_.clear();
}

// A use that was not foretold leaves the place where it is, if what was foretold still comes; after a few it
// is looked for anew, and where the uses have become others the period is given up.
void UseSchedule::follow(std::uint32_t block) {
  if (cycle_[at_] == block) {
    at_ = (at_ + 1) % period_;
    lost_ = 0;
    return;
  }
  ++surprises_;
  ++lost_;
  if (lost_ > std::max<std::size_t>(8, period_ / 4)) {
    unlearn();
    return;
  }
  resume_at(block);
}

// At the block's next place, where that is near: uses were left out. Else the place stays: a use was put in.
void UseSchedule::resume_at(std::uint32_t block) {
  const std::optional<std::size_t> ahead = until_next(block);
  if (ahead && *ahead <= std::max<std::size_t>(8, period_ / 8)) at_ = (at_ + *ahead + 1) % period_;
}

std::optional<std::size_t> UseSchedule::until_next(std::uint32_t block) const {
  const auto found = places_.find(block);
  if (!learned() || found == places_.end()) return std::nullopt;
  const std::vector<std::size_t>& places = found->second;
  const auto next = std::lower_bound(places.begin(), places.end(), at_);
  return next != places.end() ? *next - at_ : places.front() + period_ - at_;
}

std::optional<std::size_t> UseSchedule::last_place(std::uint32_t block) const {
  const auto found = places_.find(block);
  if (!learned() || found == places_.end()) return std::nullopt;
  const std::vector<std::size_t>& places = found->second;
  const auto next = std::lower_bound(places.begin(), places.end(), at_);
  return next == places.begin() ? places.back() : *std::prev(next);
}

std::vector<std::uint32_t> UseSchedule::next(std::size_t count) const {
  std::vector<std::uint32_t> blocks;
  if (!learned()) return blocks;
  for (std::size_t i = 0; i < count; ++i) blocks.push_back(cycle_[(at_ + i) % period_]);
  return blocks;
}

void UseSchedule::forget(std::uint32_t block) {
  if (places_.contains(block)) unlearn();
}

void UseSchedule::shorten() {
  const std::size_t dropped = history_.size() - 2 * options_.longest;
  history_.erase(history_.begin(), history_.begin() + static_cast<std::ptrdiff_t>(dropped));
  std::erase_if(last_run_, [&](const auto& run) { return run.second < dropped; });
  for (auto& [hash, at] : last_run_) at -= dropped;
}

}  // namespace terrace
