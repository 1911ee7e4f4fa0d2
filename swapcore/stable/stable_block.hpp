// A block whose address never changes, and the table that finds it by any address inside.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "allocator/host_handle_pool.hpp"
#include "runtime/device.hpp"
#include "swapcore/stable/use_gate.hpp"

namespace terrace {

enum class Place : std::uint8_t { kHbm, kDdr };

// HBM that backs a block, with an address of its own where it has been filled beside its block's.
struct HbmHandle {
  Physical physical;
  Bytes size;
  Address alias = nullptr;
};
struct HostBacking {
  HostHandlePool::Handle handle;
  Address alias = nullptr;
};

struct StableBlock {
  // Read by users.
  UseGate gate;
  std::atomic<std::uint64_t> users{0};     // stream slots that have used it since the last event behind them
  std::atomic<std::uint64_t> last_use{0};  // turn of the space
  std::atomic<Place> place{Place::kHbm};
  std::atomic<std::uint32_t> number{0};  // never another block's

  std::atomic<bool> has_room{false};  // on the way to HBM, which has been taken
  // Something is mapped at its address. Changed while nobody is inside; false only in DDR.
  std::atomic<bool> reachable{true};

  // The space's, under its lock. What backs a block that moves is the mover's alone.
  Address at = nullptr;
  Bytes size;
  HbmHandle hbm{};     // where place is kHbm
  HostBacking host{};  // where place is kDdr
  Place wanted = Place::kHbm;
  std::uint32_t pins = 0;
  bool held = false;     // stays where it is
  bool queued = false;   // an order waits
  bool moving = false;   // the mover has it
  bool showing = false;  // a user maps it in DDR, and until then the mover leaves it alone
  bool freed = false;
  std::uint32_t burials = 0;  // tried
  Status last_move{};         // of the last order: why it was not carried out
};

// Granules of a reserved range to the block that lies there. Lookups take no lock; a block that is gone stays
// readable memory, with its gate shut, until it is another.
class StableTable {
 public:
  StableTable(Address base, Bytes span, Bytes granule)
      : base_(reinterpret_cast<std::uintptr_t>(base)),
        span_(span.count()),
        shift_(__builtin_ctzll(granule.count())),
        granules_(std::make_unique<std::atomic<StableBlock*>[]>(span / granule)) {}

  [[nodiscard]] StableBlock* find(const void* pointer) const {
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(pointer) - base_;
    if (offset >= span_) [[likely]]
      return nullptr;
    return granules_[offset >> shift_].load(std::memory_order_acquire);
  }
  void set(Address at, Bytes size, StableBlock* block) {
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(at) - base_;
    for (std::uintptr_t i = offset >> shift_; i < (offset + size.count()) >> shift_; ++i) {
      granules_[i].store(block, std::memory_order_release);
    }
  }

 private:
  std::uintptr_t base_;
  std::uint64_t span_;
  int shift_;
  std::unique_ptr<std::atomic<StableBlock*>[]> granules_;
};

}  // namespace terrace
