// Counts what intercepted calls do, in this process's metrics page, and remembers what is live, so that a
// free gives back what its allocation was charged (wall.hpp). Device memory also goes into the trace, where
// one is recorded (runtime/trace/recorder.hpp).
//
// A process that makes no intercepted call is untouched: no thread, no socket, no memory. Nothing here
// throws, prints on stdout or changes errno. A forked child starts from nothing: what its parent allocated is
// not its own.
#pragma once

#include <array>
#include <atomic>
#include <optional>

#include "hooks/intercept/allocation_table.hpp"
#include "runtime/metrics.hpp"

namespace terrace::hooks {

class Recorder {
 public:
  constexpr Recorder() = default;

  // A call is about to be passed on.
  void calling(CallGroup group) noexcept;

  // `stream` is the handle that the call named, zero where it names none; so it is below.
  // Where the table is full the allocation is not remembered, and its charge is given back.
  void allocated(AllocationKey key, const Allocation& allocation, std::uint64_t stream) noexcept;

  // Before the real free, since its address may be somebody else's right after: the allocation as it was
  // seen, or nothing where the key is not known.
  [[nodiscard]] std::optional<Allocation> freeing(AllocationKey key, std::uint64_t stream) noexcept;
  // The real free failed after all.
  void not_freed(AllocationKey key, const Allocation& allocation, std::uint64_t stream) noexcept;
  // It succeeded: what was charged is given back.
  static void freed(const Allocation& allocation) noexcept;
  static void freed_unknown() noexcept;
  // All device memory that was seen allocated on a device is gone.
  void forget_device(int device) noexcept;

  // Physical memory, which a ledger of its own remembers.
  void created_physical(AllocationKey key, const Allocation& allocation) noexcept;
  static void releasing_physical(AllocationKey key) noexcept;

  // Memory of our own: counted among the tier's bytes, and not remembered.
  void grew(TierId tier, Bytes size) noexcept { rise({tier, size}); }
  void shrank(TierId tier, Bytes size) noexcept { fall({tier, size}); }

 private:
  static void start_again_in_child() noexcept;
  void keep(AllocationKey key, const Allocation& allocation, std::uint64_t stream) noexcept;
  void rise(const Allocation& allocation) noexcept;
  void fall(const Allocation& allocation) noexcept;

  AllocationTable table_;
  std::array<std::atomic<std::uint64_t>, kTierCount> live_bytes_{};
  std::atomic<bool> forks_watched_{false};
};

// The one of this process; never destroyed.
[[nodiscard]] Recorder& recorder() noexcept;

}  // namespace terrace::hooks
