// A recorded trace, replayed in its order against one allocator, and what came of it.
//
// One thread makes every call; recorded streams become streams of the allocator, in order of appearance. No
// work is launched on them: what is measured is where blocks go and what the calls cost.
#pragma once

#include "allocator/replay/latency_histogram.hpp"
#include "allocator/replay/replayed_allocator.hpp"
#include "runtime/trace/reader.hpp"

namespace terrace {

// What a trace asks for, whoever serves it.
struct TraceSummary {
  std::uint64_t allocations = 0;
  std::uint64_t frees = 0;
  Bytes peak_live;          // most bytes in live blocks at once, as asked for
  Bytes peak_live_rounded;  // the same with every block rounded up to 512 bytes
  Bytes largest;
  std::size_t streams = 0;
  std::uint32_t threads = 0;
  double seconds = 0;  // from the first event to the last
  bool torn = false;   // the file broke off inside an event
};
// Reads to the end. Errors: those of trace::Reader::next.
[[nodiscard]] Result<TraceSummary> summarize(trace::Reader& reader);

// The most bytes that can be live in a trace without a sum that overflows; a larger one is an error.
inline constexpr Bytes kMostLiveBytes = Bytes(1ULL << 60);

struct ReplayReport {
  std::string allocator;
  std::uint64_t allocations = 0;  // that succeeded
  std::uint64_t frees = 0;
  std::uint64_t failures = 0;  // allocations refused; their frees are left out
  Bytes largest_failure;
  Bytes peak_live;  // of the blocks that were served
  Bytes peak_live_rounded;
  Bytes reserved_at_peak;  // when live bytes were at their peak for the first time
  Bytes peak_reserved;     // zero: the allocator cannot say
  LatencyHistogram allocate_time;
  LatencyHistogram free_time;
  double seconds = 0;  // in the calls, all together

  // Bytes held for each live byte at the worst, peak reserved to peak live; zero where either is not known.
  [[nodiscard]] double reserved_ratio() const;
  // The share of what was held when live bytes were at their peak that no block used: 0 is perfect.
  [[nodiscard]] double fragmentation() const;
};
// Blocks of unknown purpose go to Pool::kScratch, as those of a process that tells us nothing do. Errors:
// those of the reader, and of the allocator but for running out, which is counted.
[[nodiscard]] Result<ReplayReport> replay(trace::Reader& reader, ReplayedAllocator& allocator);

}  // namespace terrace
