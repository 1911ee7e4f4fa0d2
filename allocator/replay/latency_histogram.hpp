// How long calls took: percentiles within 1/64 of their value, in fixed memory however many calls there were.
#pragma once

#include <array>
#include <cstdint>

#include "runtime/clock.hpp"

namespace terrace {

class LatencyHistogram {
 public:
  void add(Nanoseconds taken);  // negative counts as zero
  [[nodiscard]] std::uint64_t count() const { return count_; }
  [[nodiscard]] Nanoseconds max() const { return max_; }
  // The value that `share` (0 to 1) of the calls took at most, rounded up by at most 1/64; zero without
  // calls.
  [[nodiscard]] Nanoseconds percentile(double share) const;

 private:
  static constexpr int kStepBits = 6;  // 64 steps for each power of two
  static constexpr std::size_t kSteps = 1U << kStepBits;
  static constexpr std::size_t kBuckets = (64 - kStepBits) * kSteps;
  [[nodiscard]] static std::size_t bucket_of(std::uint64_t nanoseconds);
  [[nodiscard]] static std::uint64_t last_in(std::size_t bucket);

  std::array<std::uint64_t, kBuckets> buckets_{};
  std::uint64_t count_ = 0;
  Nanoseconds max_{};
};

}  // namespace terrace
