// Frozen experts of a group that live on NVMe: those that DDR has no room for.
//
// The store of experts loads them into its slots; here they are written, and read back for a fingerprint.
// Both are for what is done once: the host waits.
#pragma once

#include <cstddef>
#include <vector>

#include "allocator/tier.hpp"
#include "examples/moe_trainer/memory.hpp"

namespace terrace::trainer {

class ColdExperts {
 public:
  // `ranges` of the group's block of experts, in order, each with room of its own on the tier. Memory and
  // tier outlive it. Throws OutOfMemory.
  ColdExperts(Memory& memory, Tier& tier, std::vector<SlotRing::PartRange> ranges);
  ~ColdExperts();
  ColdExperts(const ColdExperts&) = delete;
  ColdExperts& operator=(const ColdExperts&) = delete;

  // Bytes at .. at + size of the block, as far as they lie in the ranges. `from`: device memory that the
  // compute stream has written. What was never written is zeros.
  void write(Bytes at, const std::byte* from, Bytes size);
  [[nodiscard]] std::vector<std::byte> read(Bytes at, Bytes size);

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
