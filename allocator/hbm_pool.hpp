// Device memory at stable addresses, inside a hard budget.
//
// A block freed on a stream may be reused on that stream at once. On another stream reuse is ordered behind
// the point of the free by a device-side wait; the host never waits. Blocks of long-lived pools (weights,
// optimizer, gradient, comm) and of short-lived ones (activation, expert, scratch) come from separate ranges.
// The pool never calls up: out of budget is a value, and the caller decides.
#pragma once

#include <memory>

#include "allocator/block_table.hpp"
#include "runtime/device.hpp"

namespace terrace {

class HbmPool {
 public:
  struct Options {
    Bytes budget;   // never exceeded by mapped memory, rounding included
    Bytes chunk{};  // physical granularity; zero: chosen from the budget (docs/design/0003-chunk-size.md)
  };
  [[nodiscard]] static Result<std::unique_ptr<HbmPool>> create(Device& device, Options options);
  ~HbmPool();  // every block freed before; waits for the streams they were freed on, which still exist

  // Returns a block of at least `size` bytes (zero counts as one), 512-byte aligned, ordered after earlier
  // frees of its range. Errors: kOutOfBudget (nothing changed; spill and ask again), kOutOfMemory,
  // kDeviceLost.
  [[nodiscard]] Result<Block> allocate(Stream stream, Bytes size, Pool pool);

  // Gives the block back once `stream` has passed this point. Freeing what is not live is a programmer error.
  void free(Stream stream, const Block& block);
  // Gives the block back now: the caller has seen every use of it complete.
  void free_completed(const Block& block);

  // Unmaps free chunks whose last use has completed. Returns the bytes given back to the device.
  Bytes trim();
  // Changes the budget. Lowered under what is mapped, trim() first; what remains above it is kept and no more
  // is mapped until usage falls. Returns the bytes by which mapped memory still exceeds the new budget.
  Bytes set_budget(Bytes budget);

  // The live block whose range holds `address`, interior pointers included.
  [[nodiscard]] std::optional<Block> find(const std::byte* address) const;

  [[nodiscard]] PoolUsage usage() const;
  // Forgets the peaks: they start again from what is held now.
  void reset_peaks();
  // The most bytes live at one time since the last call.
  Bytes take_watermark();
  // The largest block that allocate() could serve now without exceeding the budget; a hint for messages.
  [[nodiscard]] Bytes largest_available() const;

 private:
  struct Impl;
  explicit HbmPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
