// One direction of the emulated link: a copy engine that all streams share.
//
// Copies are served one at a time in the order in which they arrive, and each takes size / bytes_per_second
// of the link's time. The bytes really move, a piece at a time as the link would carry them, and between
// pieces the engine sleeps: the cores belong to those who compute.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "runtime/units.hpp"

namespace terrace::emulated {

using Time = std::chrono::steady_clock::time_point;

class Link {
 public:
  explicit Link(double bytes_per_second) : bytes_per_second_(bytes_per_second) {}
  // A copy that could start at `ready`. Returns, not before the last byte is due, when that was: later than
  // due only where the memory was slower than the link. A thread that woke late does not make the link
  // slower. The ranges do not overlap.
  [[nodiscard]] Time carry(std::byte* to, const std::byte* from, Bytes size, Time ready);

 private:
  class Turn;
  const double bytes_per_second_;
  std::mutex mutex_;
  std::condition_variable turn_changed_;
  std::uint64_t next_ticket_ = 0;
  std::uint64_t serving_ = 0;
  Time free_at_;  // belongs to whose turn it is
};

}  // namespace terrace::emulated
