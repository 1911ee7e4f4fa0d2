// Ranges of a block that live on NVMe, where DDR has no room for them: of frozen experts, of optimizer state.
//
// Rings load them into their slots, and store them; here they are written and read for what is done once: a
// start, a fingerprint, a checkpoint. The host waits. No ring has a transfer of them under way then.
#pragma once

#include <cstddef>
#include <vector>

#include "allocator/tier.hpp"
#include "examples/moe_trainer/memory.hpp"

namespace terrace::trainer {

class ColdRanges {
 public:
  // `ranges` of the block, in order, each with room of its own on the tier. Memory and tier outlive it.
  // Throws OutOfMemory.
  ColdRanges(Memory& memory, Tier& tier, Pool pool, std::vector<SlotRing::PartRange> ranges);
  ~ColdRanges();
  ColdRanges(const ColdRanges&) = delete;
  ColdRanges& operator=(const ColdRanges&) = delete;

  // Bytes at .. at + size of the block, as far as they lie in the ranges. `from`: device memory that the
  // compute stream has written. What was never written is zeros.
  void write(Bytes at, const std::byte* from, Bytes size);
  [[nodiscard]] std::vector<std::byte> read(Bytes at, Bytes size);
  // To device memory, in order of the compute stream; what lies outside of the ranges stays.
  void copy_to(std::byte* to, Bytes at, Bytes size);
  // Zeros go to the tier: a ring may load what nobody has written.
  void write_zeros();

  // The blocks of a part, in order of its ranges; empty: it does not live here.
  [[nodiscard]] std::vector<TierBlock> blocks_of(std::uint32_t part) const;

 private:
  struct Range {
    SlotRing::PartRange range;
    TierBlock block;
    bool written = false;
  };
  // run(range, first byte of it, bytes, offset from `at`) for each that overlaps.
  template <typename Run>
  void each_in(Bytes at, Bytes size, const Run& run);
  [[nodiscard]] BlockRef loaded(Range& range);
  void store(Range& range, const std::byte* from);

  Memory& memory_;
  Tier& tier_;
  std::vector<Range> ranges_;
};

}  // namespace terrace::trainer
