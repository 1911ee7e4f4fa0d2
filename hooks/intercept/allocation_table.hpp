// What was seen allocated and not freed: key to tier and size, so that a free can be taken off the right
// tier.
//
// Bounded and without heap memory: it works inside any allocation call of any process. Where it is full, an
// allocation is not kept, and its free is one of an unknown key. Safe from any thread; a shard's lock is held
// for a few memory accesses.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "runtime/units.hpp"

namespace terrace::hooks {

// Addresses and handles of physical memory live in one table without meeting. Never 0.
enum class AllocationKey : std::uint64_t {};
[[nodiscard]] constexpr AllocationKey key_of_address(std::uint64_t address) { return AllocationKey{address}; }
[[nodiscard]] constexpr AllocationKey key_of_handle(std::uint64_t handle) {
  return AllocationKey{handle ^ (std::uint64_t{1} << 63)};  // no address of a process has this bit
}

struct Allocation {
  TierId tier = TierId::kHbm;
  Bytes size;
  std::int16_t device = -1;  // whose account was charged; -1: none
  Bytes charged{};           // to that account
};

class AllocationTable {
 public:
  static constexpr std::size_t kShards = 64;
  static constexpr std::size_t kSlotsPerShard = 2048;  // a power of two

  constexpr AllocationTable() = default;

  struct Put {
    bool kept = false;
    std::optional<Allocation> replaced;  // the key was there: its free was not seen
  };
  Put put(AllocationKey key, const Allocation& allocation) noexcept;
  [[nodiscard]] std::optional<Allocation> take(AllocationKey key) noexcept;
  // Takes everything that was charged to a device. Not atomic: other threads may put at the same time.
  template <typename Visit>
  void take_all_of(int device, const Visit& visit) noexcept {
    for (Shard& shard : shards_) {
      if (shard.used == 0) continue;
      for (std::size_t at = 0; at < kSlotsPerShard;) {
        const Slot slot = shard.slots[at];
        if (slot.key == 0 || slot.device != device || !take(AllocationKey{slot.key})) {
          ++at;  // else another one has moved into its place
        } else {
          visit(slot.allocation());
        }
      }
    }
  }
  // For a forked child, where other threads' locks are never released. Precondition: no other thread.
  void clear_in_child() noexcept;

 private:
  struct Slot {
    std::uint64_t key = 0;  // 0: free
    std::uint64_t size = 0;
    std::uint64_t charged = 0;
    std::int16_t device = -1;
    TierId tier = TierId::kHbm;
    [[nodiscard]] Allocation allocation() const { return {tier, Bytes(size), device, Bytes(charged)}; }
  };
  struct Shard {
    std::atomic<bool> locked{false};
    std::size_t used = 0;
    std::array<Slot, kSlotsPerShard> slots{};
  };
  class ShardLock;

  [[nodiscard]] Shard& shard_of(std::uint64_t hash) { return shards_[hash % kShards]; }
  static void close_gap(Shard& shard, std::size_t gap) noexcept;

  std::array<Shard, kShards> shards_{};
};

}  // namespace terrace::hooks
