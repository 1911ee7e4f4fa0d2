// Monotonic time behind a seam of one function, so that a test decides what time it is.
//
// What reads time takes a Clock&; steady_clock() is the real one. Time never goes back; only differences mean
// something.
#pragma once

#include <atomic>
#include <chrono>

namespace terrace {

using Nanoseconds = std::chrono::nanoseconds;

class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual Nanoseconds now() const = 0;  // since an arbitrary start; wait-free
};

// CLOCK_MONOTONIC: the same scale for every process on the machine, which the shared page relies on.
[[nodiscard]] const Clock& steady_clock();

[[nodiscard]] constexpr double seconds_of(Nanoseconds span) {
  return std::chrono::duration<double>(span).count();
}

// A clock that stands still until told to move.
class ManualClock final : public Clock {
 public:
  [[nodiscard]] Nanoseconds now() const override { return Nanoseconds(now_.load(std::memory_order_acquire)); }
  // Precondition: span is not negative.
  void advance(Nanoseconds span);

 private:
  std::atomic<Nanoseconds::rep> now_{0};
};

}  // namespace terrace
