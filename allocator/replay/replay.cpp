#include "allocator/replay/replay.hpp"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace terrace {
namespace {

constexpr Bytes kRounding = 512_B;

class LiveBytes {
 public:
  [[nodiscard]] Status add(Bytes size) {
    if (size > kMostLiveBytes - live_) {
      return Error{.code = Errc::kInvalidArgument,
                   .text = "the trace has more than " + format_bytes(kMostLiveBytes) + " live at once"};
    }
    live_ += size;
    rounded_ += round_up(std::max(size, 1_B), kRounding);
    peak_rounded_ = std::max(peak_rounded_, rounded_);
    at_peak_ = live_ > peak_;
    peak_ = std::max(peak_, live_);
    return {};
  }
  void remove(Bytes size) {
    live_ -= size;
    rounded_ -= round_up(std::max(size, 1_B), kRounding);
  }
  [[nodiscard]] Bytes peak() const { return peak_; }
  [[nodiscard]] Bytes peak_rounded() const { return peak_rounded_; }
  [[nodiscard]] bool at_new_peak() const { return at_peak_; }  // after the last add

 private:
  Bytes live_, rounded_, peak_, peak_rounded_;
  bool at_peak_ = false;
};

// Recorded handles as streams of the replay.
class StreamNumbers {
 public:
  [[nodiscard]] ReplayStream number_of(std::uint64_t handle) {
    const auto [entry, fresh] = numbers_.try_emplace(handle, numbers_.size() % kMostReplayStreams);
    return {entry->second};
  }

 private:
  std::unordered_map<std::uint64_t, std::size_t> numbers_;
};

class Replay {
 public:
  explicit Replay(ReplayedAllocator& allocator) : allocator_(allocator) {
    report_.allocator = allocator.name();
  }

  Status take(const trace::Event& event) {
    const ReplayStream stream = streams_.number_of(event.stream);
    if (Status prepared = allocator_.prepare(stream); !prepared) return prepared;
    const ReplayBlock block{event.id, event.size};
    return event.kind == trace::Event::Kind::kAllocate ? allocate(stream, block, event.pool)
                                                       : free(stream, block);
  }

  ReplayReport finish() {
    report_.peak_live = live_.peak();
    report_.peak_live_rounded = live_.peak_rounded();
    return std::move(report_);
  }

 private:
  Status allocate(ReplayStream stream, const ReplayBlock& block, std::optional<Pool> pool) {
    const Nanoseconds before = clock_.now();
    const Status allocated = allocator_.allocate(stream, block, pool.value_or(Pool::kScratch));
    const Nanoseconds taken = clock_.now() - before;
    if (!allocated) return refused(block, allocated.error());
    report_.allocate_time.add(taken);
    report_.seconds += seconds_of(taken);
    ++report_.allocations;
    if (Status added = live_.add(block.size); !added) return added;
    const Bytes reserved = allocator_.reserved();
    report_.peak_reserved = std::max(report_.peak_reserved, reserved);
    if (live_.at_new_peak()) report_.reserved_at_peak = reserved;
    return {};
  }

  Status refused(const ReplayBlock& block, const Error& error) {
    if (error.code != Errc::kOutOfBudget && error.code != Errc::kOutOfMemory) return error;
    ++report_.failures;
    report_.largest_failure = std::max(report_.largest_failure, block.size);
    refused_.insert(block.id);
    return {};
  }

  Status free(ReplayStream stream, const ReplayBlock& block) {
    if (refused_.erase(block.id) != 0) return {};
    const Nanoseconds before = clock_.now();
    const Status freed = allocator_.free(stream, block);
    const Nanoseconds taken = clock_.now() - before;
    if (!freed) return freed;
    report_.free_time.add(taken);
    report_.seconds += seconds_of(taken);
    ++report_.frees;
    live_.remove(block.size);
    return {};
  }

  ReplayedAllocator& allocator_;
  const Clock& clock_ = steady_clock();
  StreamNumbers streams_;
  LiveBytes live_;
  std::unordered_set<std::uint64_t> refused_;
  ReplayReport report_;
};

}  // namespace

Result<TraceSummary> summarize(trace::Reader& reader) {
  TraceSummary summary;
  LiveBytes live;
  std::unordered_set<std::uint64_t> streams;
  std::optional<std::uint64_t> first;
  while (true) {
    const auto event = reader.next();
    if (!event) return event.error();
    if (!*event) break;
    const trace::Event& seen = **event;
    streams.insert(seen.stream);
    summary.threads = std::max(summary.threads, seen.thread + 1);
    if (!first) first = seen.microseconds;
    summary.seconds = static_cast<double>(seen.microseconds - *first) * 1e-6;
    if (seen.kind == trace::Event::Kind::kAllocate) {
      ++summary.allocations;
      summary.largest = std::max(summary.largest, seen.size);
      if (Status added = live.add(seen.size); !added) return added.error();
    } else {
      ++summary.frees;
      live.remove(seen.size);
    }
  }
  summary.peak_live = live.peak();
  summary.peak_live_rounded = live.peak_rounded();
  summary.streams = streams.size();
  summary.torn = reader.torn();
  return summary;
}

Result<ReplayReport> replay(trace::Reader& reader, ReplayedAllocator& allocator) {
  Replay replay(allocator);
  while (true) {
    const auto event = reader.next();
    if (!event) return event.error();
    if (!*event) return replay.finish();
    if (Status taken = replay.take(**event); !taken) return taken.error();
  }
}

double ReplayReport::reserved_ratio() const {
  if (peak_live == 0_B) return 0;
  return static_cast<double>(peak_reserved.count()) / static_cast<double>(peak_live.count());
}

double ReplayReport::fragmentation() const {
  if (reserved_at_peak == 0_B) return 0;
  return 1 - static_cast<double>(peak_live.count()) / static_cast<double>(reserved_at_peak.count());
}

}  // namespace terrace
