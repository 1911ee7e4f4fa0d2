// Who may use a block just now: any number of users, or the mover alone.
//
// A user is inside from before it reads where its pointers lead until it has given its work to a stream: for
// a call to the driver, microseconds. What the stream does later is ordered by events, not here. A user that
// finds one gate of several shut leaves all others before it waits: holding one while waiting for another
// would let two of them, or one and the mover, wait for each other.
#pragma once

#include <atomic>
#include <cstdint>

namespace terrace {

class UseGate {
 public:
  // True: inside, and then leave(). False: shut. One atomic operation where it is open.
  [[nodiscard]] bool try_enter() {
    if ((word_.fetch_add(kUser, std::memory_order_acquire) & kShut) == 0) [[likely]]
      return true;
    leave();
    return false;
  }
  void leave() {
    if (word_.fetch_sub(kUser, std::memory_order_release) == (kShut | kUser)) word_.notify_all();
  }
  // Returns once it is not shut, which it may be again by then.
  void await_open() const {
    for (std::uint64_t word = word_.load(std::memory_order_acquire); (word & kShut) != 0;
         word = word_.load(std::memory_order_acquire)) {
      word_.wait(word, std::memory_order_acquire);
    }
  }

  // The mover: shut(), await_empty(), then it is alone; at last open(). One mover at a time.
  void shut() { word_.fetch_or(kShut, std::memory_order_acq_rel); }
  void await_empty() const {
    for (std::uint64_t word = word_.load(std::memory_order_acquire); word != kShut;
         word = word_.load(std::memory_order_acquire)) {
      word_.wait(word, std::memory_order_acquire);
    }
  }
  void open() {
    word_.fetch_and(~kShut, std::memory_order_release);
    word_.notify_all();
  }
  [[nodiscard]] bool is_shut() const { return (word_.load(std::memory_order_acquire) & kShut) != 0; }

 private:
  static constexpr std::uint64_t kShut = 1, kUser = 2;
  std::atomic<std::uint64_t> word_{0};
};

}  // namespace terrace
