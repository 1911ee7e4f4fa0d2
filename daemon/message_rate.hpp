// How fast one connection is listened to: a bucket that fills with time. Nothing is refused: who talks faster
// waits, and the socket holds the rest.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace terrace {

class MessageRate {
 public:
  using Time = std::chrono::milliseconds;  // since whenever, never back
  static constexpr std::int64_t kBurst = 256;
  static constexpr Time kEach{16};  // some sixty a second: a lease is a matter of steps, not of allocations

  // Takes one message; false: not before opens_at().
  [[nodiscard]] bool take(Time now) {
    const std::int64_t filled = (now - filled_at_) / kEach;
    left_ = std::min(kBurst, left_ + filled);
    filled_at_ += filled * kEach;
    if (left_ == 0) return false;
    --left_;
    return true;
  }
  // After a refused take(): when a few may be taken, so that nobody wakes for each.
  [[nodiscard]] Time opens_at() const { return filled_at_ + kNap; }

 private:
  static constexpr Time kNap = 8 * kEach;
  std::int64_t left_ = kBurst;
  Time filled_at_{0};
};

}  // namespace terrace
