// Pinned host memory for spilled blocks, inside a hard budget.
//
// Slabs are mapped with huge pages where the system grants them, touched, pinned through the device and kept:
// pinning is slow, reuse is free. Blocks come at their exact size, rounded to 4 KiB. A block is freed when no
// copy uses it any more: host memory has no stream order.
#pragma once

#include <memory>
#include <vector>

#include "allocator/block_table.hpp"
#include "runtime/device.hpp"

namespace terrace {

class DdrPool {
 public:
  struct Options {
    Bytes budget;         // pinned bytes, never exceeded; zero: every allocation is refused
    Bytes slab = 64_MiB;  // least bytes pinned at a time
    std::vector<int>
        numa_nodes{};  // bind slabs to one, interleave over several; none: wherever first touch puts them
    bool hugepages = true;
  };
  [[nodiscard]] static Result<std::unique_ptr<DdrPool>> create(Device& device, Options options);
  ~DdrPool();  // every block freed before

  // Errors: kOutOfBudget, kOutOfMemory (mmap or pinning refused; the text says which). Nothing changed.
  [[nodiscard]] Result<Block> allocate(Bytes size, Pool pool);
  void free(const Block& block);

  void set_budget(Bytes budget);
  [[nodiscard]] PoolUsage usage() const;
  void reset_peaks();

 private:
  struct Impl;
  explicit DdrPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
