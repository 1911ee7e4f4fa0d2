// The one budget that all pools of host memory draw from: pinned slabs and host-NUMA handles are the same
// bytes.
//
// Lock-free, shared by the pools. A pool charges before it takes memory from the system and releases after it
// has given it back, so that what is held never exceeds the budget by more than a budget was lowered.
#pragma once

#include <algorithm>
#include <atomic>

#include "runtime/assert.hpp"
#include "runtime/units.hpp"

namespace terrace {

class HostLease {
 public:
  struct Range {
    Bytes least, most;
  };

  explicit HostLease(Bytes budget) : budget_(budget.count()) {}
  HostLease(const HostLease&) = delete;
  HostLease& operator=(const HostLease&) = delete;

  // Charges as much of `wanted` as there is room for, in whole pages of 4 KiB below `most`; zero, and nothing
  // charged, where there is not even room for `least`. Precondition: least <= most.
  [[nodiscard]] Bytes charge(Range wanted) {
    std::uint64_t held = held_.load(std::memory_order_relaxed);
    for (;;) {
      const Bytes room = saturating_sub(budget(), Bytes(held));
      if (room < wanted.least) return {};
      const Bytes granted = std::max(wanted.least, std::min(round_down(room, 4_KiB), wanted.most));
      if (held_.compare_exchange_weak(held, held + granted.count(), std::memory_order_relaxed))
        return granted;
    }
  }
  [[nodiscard]] bool try_charge(Bytes size) { return charge({.least = size, .most = size}) == size; }
  void release(Bytes size) {
    const std::uint64_t before = held_.fetch_sub(size.count(), std::memory_order_relaxed);
    TERRACE_CHECK(before >= size.count(), "what is released was charged");
  }

  void set_budget(Bytes budget) { budget_.store(budget.count(), std::memory_order_relaxed); }
  [[nodiscard]] Bytes budget() const { return Bytes(budget_.load(std::memory_order_relaxed)); }
  [[nodiscard]] Bytes held() const { return Bytes(held_.load(std::memory_order_relaxed)); }
  [[nodiscard]] Bytes room() const { return saturating_sub(budget(), held()); }
  [[nodiscard]] Bytes excess() const { return saturating_sub(held(), budget()); }

 private:
  std::atomic<std::uint64_t> budget_;
  std::atomic<std::uint64_t> held_{0};
};

}  // namespace terrace
