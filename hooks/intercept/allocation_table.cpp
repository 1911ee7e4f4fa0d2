#include "hooks/intercept/allocation_table.hpp"

#include <sched.h>

namespace terrace::hooks {
namespace {

constexpr std::size_t kMask = AllocationTable::kSlotsPerShard - 1;
static_assert((AllocationTable::kSlotsPerShard & kMask) == 0);
// Above this linear probing gets long.
constexpr std::size_t kUsedMost = AllocationTable::kSlotsPerShard / 8 * 7;

// Addresses differ in their middle bits; the finalizer of splitmix64 spreads them.
std::uint64_t hash_of(std::uint64_t key) {
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ULL;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebULL;
  return key ^ (key >> 31);
}
std::size_t home_of(std::uint64_t hash) { return (hash / AllocationTable::kShards) & kMask; }

}  // namespace

// A mutex may allocate or be destroyed before the last call of a process; a flag does neither.
class AllocationTable::ShardLock {
 public:
  explicit ShardLock(Shard& shard) noexcept : shard_(shard) {
    while (shard_.locked.exchange(true, std::memory_order_acquire)) sched_yield();
  }
  ~ShardLock() { shard_.locked.store(false, std::memory_order_release); }
  ShardLock(const ShardLock&) = delete;
  ShardLock& operator=(const ShardLock&) = delete;

 private:
  Shard& shard_;
};

AllocationTable::Put AllocationTable::put(AllocationKey key, const Allocation& allocation) noexcept {
  const auto wanted = static_cast<std::uint64_t>(key);
  if (wanted == 0) return {};
  const std::uint64_t hash = hash_of(wanted);
  Shard& shard = shard_of(hash);
  const ShardLock lock(shard);
  std::size_t at = home_of(hash);
  while (shard.slots[at].key != 0 && shard.slots[at].key != wanted) at = (at + 1) & kMask;
  Slot& slot = shard.slots[at];
  Put result;
  if (slot.key == wanted) {
    result.replaced = slot.allocation();
  } else {
    if (shard.used >= kUsedMost) return {};
    ++shard.used;
  }
  slot = {wanted, allocation.size.count(), allocation.charged.count(), allocation.device, allocation.tier};
  result.kept = true;
  return result;
}

std::optional<Allocation> AllocationTable::take(AllocationKey key) noexcept {
  const auto wanted = static_cast<std::uint64_t>(key);
  if (wanted == 0) return std::nullopt;
  const std::uint64_t hash = hash_of(wanted);
  Shard& shard = shard_of(hash);
  const ShardLock lock(shard);
  std::size_t at = home_of(hash);
  while (shard.slots[at].key != wanted) {
    if (shard.slots[at].key == 0) return std::nullopt;
    at = (at + 1) & kMask;
  }
  const Allocation taken = shard.slots[at].allocation();
  close_gap(shard, at);
  --shard.used;
  return taken;
}

// Moves later entries of the probe chain up, so that no tombstones gather.
void AllocationTable::close_gap(Shard& shard, std::size_t gap) noexcept {
  for (std::size_t at = (gap + 1) & kMask; shard.slots[at].key != 0; at = (at + 1) & kMask) {
    const std::size_t home = home_of(hash_of(shard.slots[at].key));
    // An entry may fill the gap if its home isn't after the gap, going round.
    if (((at - home) & kMask) < ((at - gap) & kMask)) continue;
    shard.slots[gap] = shard.slots[at];
    gap = at;
  }
  shard.slots[gap] = {};
}

void AllocationTable::clear_in_child() noexcept {
  for (Shard& shard : shards_) {
    // Untouched pages stay so. A thread may have been between its slot and its count when the fork happened.
    const bool touched = shard.used != 0 || shard.locked.load(std::memory_order_relaxed);
    if (touched) shard.slots.fill({});
    shard.used = 0;
    shard.locked.store(false, std::memory_order_relaxed);
  }
}

}  // namespace terrace::hooks
