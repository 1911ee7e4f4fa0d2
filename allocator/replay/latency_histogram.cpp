#include "allocator/replay/latency_histogram.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace terrace {

// Values below 64 have a bucket each; above, the six bits after the leading one choose it.
std::size_t LatencyHistogram::bucket_of(std::uint64_t nanoseconds) {
  if (nanoseconds < kSteps) return nanoseconds;
  const int shift = std::bit_width(nanoseconds) - kStepBits - 1;
  return static_cast<std::size_t>(shift) * kSteps + (nanoseconds >> shift);
}

std::uint64_t LatencyHistogram::last_in(std::size_t bucket) {
  if (bucket < 2 * kSteps) return bucket;
  const std::size_t shift = bucket / kSteps - 1;
  return ((kSteps + bucket % kSteps + 1) << shift) - 1;
}

void LatencyHistogram::add(Nanoseconds taken) {
  const auto nanoseconds = static_cast<std::uint64_t>(std::max<Nanoseconds::rep>(taken.count(), 0));
  ++buckets_[bucket_of(nanoseconds)];
  ++count_;
  max_ = std::max(max_, Nanoseconds(static_cast<Nanoseconds::rep>(nanoseconds)));
}

Nanoseconds LatencyHistogram::percentile(double share) const {
  if (count_ == 0) return {};
  const double exact = std::ceil(std::clamp(share, 0.0, 1.0) * static_cast<double>(count_));
  const std::uint64_t wanted = std::clamp<std::uint64_t>(static_cast<std::uint64_t>(exact), 1, count_);
  std::uint64_t seen = 0;
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
    seen += buckets_[bucket];
    if (seen >= wanted) return std::min(max_, Nanoseconds(static_cast<Nanoseconds::rep>(last_in(bucket))));
  }
  return max_;
}

}  // namespace terrace
