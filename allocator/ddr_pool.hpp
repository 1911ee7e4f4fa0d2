// Pinned host memory for spilled blocks, inside a hard budget.
//
// Blocks of 1 MiB and more are page-granular ranges of pinned slabs (pinned_extents.hpp) at their exact size,
// rounded to 4 KiB; smaller ones come from areas cut into size classes (small_blocks.hpp). Pinning is slow,
// reuse is free: freed memory stays pinned until trim() or a lower budget. A block is freed when no copy uses
// it any more: host memory has no stream order. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "allocator/block.hpp"
#include "allocator/host_lease.hpp"
#include "allocator/huge_pages.hpp"
#include "allocator/pool_usage.hpp"
#include "runtime/device.hpp"

namespace terrace {

class DdrPool {
 public:
  struct Options {
    Bytes budget;  // pinned bytes, never exceeded; zero: every allocation is refused
    // Shared with the other pools of host memory; then `budget` is not read. Null: a lease of the pool's own.
    std::shared_ptr<HostLease> lease{};
    Bytes slab = 64_MiB;  // least bytes pinned at a time
    // One: the node that memory is wanted on; several: interleaved; none: wherever first touch puts it.
    std::vector<int> numa_nodes{};
    HugePages huge_pages = HugePages::kTransparent;
    // Where a line for a person goes, each kind once; empty: stderr.
    std::function<void(std::string_view line)> say{};
  };
  // Errors: kInvalidArgument (a node that does not exist, has no memory or is closed to this process),
  // kOutOfMemory (no memory for tables).
  [[nodiscard]] static Result<std::unique_ptr<DdrPool>> create(Device& device, Options options);
  ~DdrPool();  // every block freed before
  DdrPool(const DdrPool&) = delete;
  DdrPool& operator=(const DdrPool&) = delete;

  // Size 0 gives a block of its own. Errors: kOutOfBudget, kOutOfMemory (mmap, first touch or pinning
  // refused; the text says which, and which limit leaves least). Nothing changed.
  [[nodiscard]] Result<Block> allocate(Bytes size, Pool pool);
  // Known by its address. Errors: kInvalidArgument (not the first byte of a live block: freed already, inside
  // one, or never ours); nothing changed.
  [[nodiscard]] Status free(const Block& block);

  // Sets the lease's budget. Lowered, memory that is wholly free is unpinned and given back; blocks in use
  // stay. Returns what is still held above the budget, by all pools of the lease.
  Bytes set_budget(Bytes budget);
  // Unpins and gives back every slab that is wholly free. Returns the bytes given back.
  Bytes trim();
  [[nodiscard]] PoolUsage usage() const;
  void reset_peaks();

 private:
  struct Impl;
  explicit DdrPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
