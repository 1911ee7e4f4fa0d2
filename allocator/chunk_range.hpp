// A reserved address range into which equal physical chunks are mapped, with its free extents.
//
// Addresses are stable: a block keeps its address for life, while free chunks under the range come and go.
// Not thread-safe: the owning pool locks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "allocator/extent_map.hpp"
#include "runtime/device.hpp"

namespace terrace {

class ChunkRange {
 public:
  // Precondition: size is a multiple of chunk, chunk of the device's granularity.
  [[nodiscard]] static Result<ChunkRange> create(Device& device, Bytes size, Bytes chunk);
  ChunkRange(ChunkRange&& other) noexcept;
  ChunkRange& operator=(ChunkRange&&) = delete;
  ~ChunkRange();  // unmaps and destroys what is mapped; no work may be using it

  // Where a block of `size` could go if chunks were mapped: its offset, the first chunk to map and how many.
  struct Growth {
    std::uint64_t offset = 0;
    std::size_t first_chunk = 0;
    std::size_t chunks = 0;
  };
  // The growth that maps the fewest chunks; none where the range itself is too small.
  [[nodiscard]] std::optional<Growth> plan_growth(Bytes size) const;
  // Maps `physical` as chunk `index`, which is unmapped; its bytes become free. On error nothing changed.
  [[nodiscard]] Status map_chunk(std::size_t index, Physical physical);
  // A chunk that is wholly free, preferring the highest, and not in [avoid.first_chunk - 1, ...] of a growth
  // being planned; none where there is none.
  [[nodiscard]] std::optional<std::size_t> free_chunk(const Growth* avoid) const;
  [[nodiscard]] std::uint64_t pending_in(std::size_t index) const;
  // Unmaps a wholly free chunk that no work uses any more; its physical memory is the caller's.
  [[nodiscard]] Result<Physical> unmap_chunk(std::size_t index);

  [[nodiscard]] Address address_of(std::uint64_t offset) const { return base_ + offset; }
  [[nodiscard]] bool holds(const std::byte* address) const;
  [[nodiscard]] std::uint64_t offset_of(const std::byte* address) const;
  [[nodiscard]] ExtentMap& free() { return free_; }
  [[nodiscard]] const ExtentMap& free() const { return free_; }
  // Bytes that could be allocated next to each other if `chunks` more were mapped.
  [[nodiscard]] Bytes largest_with(std::size_t chunks) const;

 private:
  ChunkRange(Device& device, Address base, Bytes size, Bytes chunk);
  [[nodiscard]] std::size_t unmapped_run(std::size_t first, std::size_t wanted) const;

  Device* device_;
  Address base_;
  Bytes size_;
  Bytes chunk_;
  std::vector<std::optional<Physical>> chunks_;
  ExtentMap free_;
};

}  // namespace terrace
