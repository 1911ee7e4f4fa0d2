// Mutual exclusion that costs its owner two plain stores.
//
// One thread, the owner, enters and leaves at every turn; others, rarely, stop it. The owner says that it is
// inside and then asks whether it is to stay out; the stopper asks it to stay out and then waits until it is
// not inside. Each must see what the other wrote before it read. Ordinarily both would need a full fence;
// here the stopper's membarrier() makes every thread of the process pass one, so the owner needs none. Where
// the system has no membarrier, and under the thread sanitizer, which knows no such fences, the owner's store
// is a fence too.
//
// Stoppers exclude each other by a lock of their own.
#pragma once

#include <atomic>
#include <cstdint>

namespace terrace {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

class OwnerGate {
 public:
  // Anything but zero makes enter() fail; all but kStop are reasons for which enter_anyway() is enough.
  static constexpr std::uint32_t kStop = 1;       // somebody else is at work inside
  static constexpr std::uint32_t kAttention = 2;  // the owner has more to do than its fast path knows
  static constexpr std::uint32_t kFence = 4;      // this system has no membarrier

  OwnerGate();

  // The owner: true, and then leave(); or false, and it stays out.
  [[nodiscard, gnu::always_inline]] bool enter() {
    if constexpr (kThreadSanitizer) return enter_with_fence(0);
    inside_.store(1, std::memory_order_relaxed);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (flags_.load(std::memory_order_acquire) == 0) [[likely]]
      return true;
    leave();
    return false;
  }
  // The same, whatever the flags, unless stopped.
  [[nodiscard]] bool enter_anyway() { return enter_with_fence(kAttention | kFence); }
  [[gnu::always_inline]] void leave() { inside_.store(0, std::memory_order_release); }

  [[nodiscard]] std::uint32_t flags() const { return flags_.load(std::memory_order_relaxed); }
  void raise(std::uint32_t flag) { flags_.fetch_or(flag, std::memory_order_seq_cst); }
  void lower(std::uint32_t flag) { flags_.fetch_and(~flag, std::memory_order_release); }
  // A stopper: raise(kStop) on each gate, one barrier(), await_owner() on each; at last lower(kStop).
  static void barrier();
  void await_owner() const;

 private:
  [[nodiscard]] bool enter_with_fence(std::uint32_t allowed);
  std::atomic<std::uint32_t> inside_{0};
  std::atomic<std::uint32_t> flags_{0};
};

}  // namespace terrace
