// A reserved address range into which equal physical chunks are mapped, with its free extents.
//
// Addresses are stable: a block keeps its address for life, while free chunks under the range come and go.
// Not thread-safe: the owning pool locks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "allocator/extent_map.hpp"
#include "runtime/device.hpp"

namespace terrace {

// Address space of a device, given back at the end unless something is still mapped in it.
class Reservation {
 public:
  [[nodiscard]] static Result<Reservation> make(Device& device, Bytes size);
  Reservation(Reservation&& other) noexcept
      : device_(other.device_), base_(std::exchange(other.base_, nullptr)), size_(other.size_) {}
  Reservation& operator=(Reservation&&) = delete;
  ~Reservation() {
    if (base_ != nullptr) device_->release(base_, size_);
  }
  [[nodiscard]] Address base() const { return base_; }
  [[nodiscard]] Bytes size() const { return size_; }
  void abandon() { base_ = nullptr; }

 private:
  Reservation(Device& device, Address base, Bytes size) : device_(&device), base_(base), size_(size) {}
  Device* device_;
  Address base_;
  Bytes size_;
};

class ChunkRange {
 public:
  struct Place {
    std::uint64_t offset = 0;  // in the reservation
    Bytes size;                // a multiple of the chunk
    Bytes chunk;               // a multiple of the device's granularity
  };
  // A part of `reservation`, which outlives it.
  ChunkRange(Device& device, Reservation& reservation, const Place& place);
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
  // Maps `pieces` as the chunks from `first` on, which are unmapped; their bytes become free. On error
  // nothing changed.
  [[nodiscard]] Status map_chunks(std::size_t first, std::span<const Physical> pieces);
  // A chunk that is wholly free, preferring the highest, in an extent that `wanted` likes and that the growth
  // being planned, if any, does not extend; none where there is none.
  template <typename Wanted>
  [[nodiscard]] std::optional<std::size_t> free_chunk(const Growth* avoid, const Wanted& wanted) const {
    const auto& extents = free_.by_offset();
    for (auto it = extents.rbegin(); it != extents.rend(); ++it) {
      const Chunks whole = whole_chunks(it->second, avoid);
      if (whole.first < whole.end && wanted(it->second)) return whole.end - 1;
    }
    return std::nullopt;
  }
  // How many chunks free_chunk() could give, one after the other.
  [[nodiscard]] std::size_t free_chunks(const Growth* avoid) const;
  // The free extent that holds a wholly free chunk.
  [[nodiscard]] const Extent& extent_of(std::size_t index) const;
  // Unmaps a wholly free chunk that no work uses any more; its physical memory is the caller's.
  [[nodiscard]] Result<Physical> unmap_chunk(std::size_t index);

  [[nodiscard]] Address address_of(std::uint64_t offset) const { return base_ + offset; }
  [[nodiscard]] bool holds(const std::byte* address) const;
  [[nodiscard]] std::uint64_t offset_of(const std::byte* address) const;
  [[nodiscard]] Bytes size() const { return size_; }
  [[nodiscard]] std::size_t chunk_count() const { return chunks_.size(); }
  [[nodiscard]] bool mapped(std::size_t index) const { return chunks_[index].has_value(); }
  [[nodiscard]] ExtentMap& free() { return free_; }
  [[nodiscard]] const ExtentMap& free() const { return free_; }
  // Bytes that could be allocated next to each other if `chunks` more were mapped.
  [[nodiscard]] Bytes largest_with(std::size_t chunks) const;

 private:
  struct Chunks {
    std::size_t first = 0, end = 0;
  };
  // The chunks that lie wholly in a free extent; none in the one that the growth extends.
  [[nodiscard]] Chunks whole_chunks(const Extent& extent, const Growth* avoid) const;
  [[nodiscard]] std::size_t unmapped_run(std::size_t first, std::size_t wanted) const;

  Device* device_;
  Reservation* reservation_;
  Address base_;
  Bytes size_;
  Bytes chunk_;
  std::vector<std::optional<Physical>> chunks_;
  ExtentMap free_;
};

}  // namespace terrace
