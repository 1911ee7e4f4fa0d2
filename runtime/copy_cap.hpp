// A bandwidth cap: when the next piece may start, so that what was started before keeps to a rate.
//
// A bucket that may go into debt: a piece starts when the debt of those before it is paid off, and then owes
// its whole size, however large. Saved-up time counts for kBurst at most, so that an idle while is not
// followed by a flood. No clock and no lock: the caller says what time it is, and it never goes back.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>

#include "runtime/clock.hpp"
#include "runtime/units.hpp"

namespace terrace {

class CopyCap {
 public:
  static constexpr Nanoseconds kBurst = std::chrono::milliseconds(5);

  // Bytes a second; 0: no cap, and no debt. A change keeps the debt, in bytes.
  // Precondition: neither negative nor NaN.
  void set_rate(double bytes_per_second, Nanoseconds now) {
    refill(now);
    rate_ = bytes_per_second;
    level_ = rate_ > 0 ? std::min(level_, burst()) : 0;
  }
  [[nodiscard]] double rate() const { return rate_; }

  [[nodiscard]] bool open(Nanoseconds now) {
    refill(now);
    return level_ >= 0;
  }
  // When open() will be true, if nothing more is spent.
  [[nodiscard]] Nanoseconds opens_at(Nanoseconds now) {
    refill(now);
    if (level_ >= 0) return now;
    // A cap of a byte a second must not overflow the clock.
    const double seconds = std::min(-level_ / rate_, 1e6);
    return now + Nanoseconds(static_cast<Nanoseconds::rep>(std::ceil(seconds * 1e9)));
  }
  // What starts now, capped or not: those who may not wait are paid for by those who may.
  void spend(Bytes size, Nanoseconds now) {
    if (rate_ <= 0) return;
    refill(now);
    level_ -= static_cast<double>(size.count());
  }
  // The same, but the debt grows to what `longest` pays off at most.
  void spend_within(Bytes size, Nanoseconds longest, Nanoseconds now) {
    if (rate_ <= 0) return;
    refill(now);
    level_ =
        std::max(level_ - static_cast<double>(size.count()), std::min(level_, -rate_ * seconds_of(longest)));
  }

 private:
  [[nodiscard]] double burst() const { return rate_ * seconds_of(kBurst); }
  void refill(Nanoseconds now) {
    if (rate_ > 0)
      level_ = std::min(burst(), level_ + rate_ * seconds_of(std::max(now - at_, Nanoseconds(0))));
    at_ = std::max(at_, now);
  }

  double rate_ = 0;
  double level_ = 0;  // bytes that may start at once; negative: owed
  Nanoseconds at_{0};
};

}  // namespace terrace
