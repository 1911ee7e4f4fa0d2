#include "allocator/thread_cache.hpp"

#include <algorithm>

namespace terrace {
namespace {

constexpr std::uint64_t kLargePartOfBudget = 16;
constexpr std::uint64_t kSmallPartOfBudget = 32;  // for all small stacks of all lanes

// What current_ points at where there is no lane: its key is that of no stream.
ThreadCache::Lane& no_lane() {
  static ThreadCache::Lane lane;
  return lane;
}

}  // namespace

ThreadCache::ThreadCache(const Device& device, BlockTable& table, PublishedLive& published, Limits limits)
    : device_(&device), streams_ended_(device.streams_ended()), words_(table.words()), counter_(published) {
  current_.fill(&no_lane());
  set_limits(limits);
}

void ThreadCache::set_limits(Limits limits) {
  large_limit_ = limits.budget.count() / kLargePartOfBudget;
  small_bin_bytes_ = limits.budget.count() / kSmallPartOfBudget / (kLanes * kSmallBins);
}

void ThreadCache::set_lane(std::size_t victim, Stream stream, Lifetime lifetime, StreamOrder::Index index) {
  drop_lane(victim);
  auto lane = std::make_unique<Lane>();
  lane->key = std::uint64_t{stream.id} + 1;
  lane->stream = stream;
  lane->lifetime = lifetime;
  lane->index = index;
  for (std::size_t i = 0; i < kSmallBins; ++i) {
    const std::uint64_t fit = small_bin_bytes_ / ((i + 1) << kUnitShift);
    lane->small[i].limit = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(fit, 1, SmallBin::kMost));
  }
  lanes_[victim] = std::move(lane);
}

void ThreadCache::drop_lane(std::size_t lane) {
  for (Lane*& current : current_) {
    if (current == lanes_[lane].get()) current = &no_lane();
  }
  lanes_[lane].reset();
}

ThreadCache::Lane* ThreadCache::use_lane(Stream stream, Pool pool) {
  for (const auto& lane : lanes_) {
    if (lane == nullptr || lane->stream != stream || lane->lifetime != lifetime_of(pool)) continue;
    current_[place_of(stream, pool)] = lane.get();
    return lane.get();
  }
  return nullptr;
}

void ThreadCache::claim_bin(Lane& lane, std::uint64_t units) {
  LargeBin& first = lane.large_bin(units);
  LargeBin& second = lane.other_bin(first);
  if (first.units == units || second.units == units) return;
  if (first.count == 0) {
    first.units = units;
  } else if (second.count == 0) {
    second.units = units;
  }
}

}  // namespace terrace
