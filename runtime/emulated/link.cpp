#include "runtime/emulated/link.hpp"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace terrace::emulated {

namespace {

using Nanoseconds = std::chrono::nanoseconds;

// Long enough that a wake-up is cheap beside it, short enough that the bytes do not all arrive at once.
constexpr std::size_t kPiece = std::size_t{1} << 20;

void sleep_until(Time due) {
  const auto since_start = std::chrono::duration_cast<Nanoseconds>(due.time_since_epoch()).count();
  const timespec until{.tv_sec = static_cast<time_t>(since_start / 1'000'000'000),
                       .tv_nsec = static_cast<long>(since_start % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

}  // namespace

// Has the engine from construction to destruction, in order of arrival: a mutex alone would let one busy
// stream starve the others.
class Link::Turn {
 public:
  explicit Turn(Link& link) : link_(link) {
    std::unique_lock lock(link_.mutex_);
    const std::uint64_t mine = link_.next_ticket_++;
    link_.turn_changed_.wait(lock, [&] { return link_.serving_ == mine; });
  }
  ~Turn() {
    {
      const std::lock_guard lock(link_.mutex_);
      ++link_.serving_;
    }
    link_.turn_changed_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Link& link_;
};

Time Link::carry(std::byte* to, const std::byte* from, Bytes size, Time ready) {
  const Turn turn(*this);
  const Time start = std::max(ready, free_at_);
  const std::size_t total = size.count();
  Nanoseconds moving{0};
  Time due = start;
  for (std::size_t done = 0; done < total;) {
    const std::size_t piece = std::min(kPiece, total - done);
    const Time before = std::chrono::steady_clock::now();
    std::memcpy(to + done, from + done, piece);
    const Time after = std::chrono::steady_clock::now();
    done += piece;
    moving += after - before;
    // From the start of the copy, not from the last piece: a late wake-up is made up for by the next.
    const std::chrono::duration<double> on_link(static_cast<double>(done) / bytes_per_second_);
    due = start + std::max(std::chrono::ceil<Nanoseconds>(on_link), moving);
    if (due > after) sleep_until(due);
  }
  free_at_ = due;
  return due;
}

}  // namespace terrace::emulated
