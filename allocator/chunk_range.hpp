// A reserved address range into which physical chunks are mapped, with its free extents.
//
// Addresses are stable: a block keeps its address for life, while free chunks under the range come and go.
// Not thread-safe: the owning pool locks.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <utility>

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
    Bytes size;
  };
  struct ChunkSize {
    Bytes least;  // the device's granularity
    Bytes most;   // a multiple of it
  };
  // A part of `reservation`, which outlives it.
  ChunkRange(Device& device, Reservation& reservation, const Place& place, const ChunkSize& chunk);
  ChunkRange(ChunkRange&& other) noexcept;
  ChunkRange& operator=(ChunkRange&&) = delete;
  ~ChunkRange();  // unmaps and destroys what is mapped; no work may be using it

  // Where a block could go if `missing` bytes were mapped from `first` on. Behind it lies room for chunks of
  // any size of which the last starts before the end of what is missing.
  struct Growth {
    std::uint64_t offset = 0;  // of the block
    std::uint64_t first = 0;   // of what is to be mapped
    Bytes missing;             // a multiple of the least chunk
    Bytes room;
  };
  // The growth that maps least for a block that no free extent holds; none where the range itself is too
  // small.
  [[nodiscard]] std::optional<Growth> plan_growth(Bytes size) const;
  // Maps chunks next to each other from the offset `first` on, where nothing is mapped; their bytes become
  // free. On error nothing changed.
  [[nodiscard]] Status map_chunks(std::uint64_t first, std::span<const PhysicalPiece> chunks);
  // The offset of a chunk that is wholly free, preferring the highest, in an extent that `wanted` likes and
  // that the growth being planned, if any, does not extend; none where there is none.
  template <typename Wanted>
  [[nodiscard]] std::optional<std::uint64_t> free_chunk(const Growth* avoid, const Wanted& wanted) const {
    const auto& extents = free_.by_offset();
    for (auto it = extents.rbegin(); it != extents.rend(); ++it) {
      const Span whole = whole_chunks(it->second, avoid);
      if (whole.first < whole.end && wanted(it->second))
        return std::prev(chunks_.lower_bound(whole.end))->first;
    }
    return std::nullopt;
  }
  // The bytes of all chunks that free_chunk() could give, one after the other.
  [[nodiscard]] Bytes free_chunk_bytes(const Growth* avoid) const;
  // The free extent that holds a wholly free chunk.
  [[nodiscard]] const Extent& extent_of(std::uint64_t chunk) const;
  // Unmaps a wholly free chunk that no work uses any more; its physical memory is the caller's.
  [[nodiscard]] Result<PhysicalPiece> unmap_chunk(std::uint64_t chunk);

  [[nodiscard]] Address address_of(std::uint64_t offset) const { return base_ + offset; }
  [[nodiscard]] bool holds(const std::byte* address) const;
  [[nodiscard]] std::uint64_t offset_of(const std::byte* address) const;
  [[nodiscard]] Bytes size() const { return size_; }
  // What is mapped, by offset.
  [[nodiscard]] const std::map<std::uint64_t, PhysicalPiece>& chunks() const { return chunks_; }
  [[nodiscard]] ExtentMap& free() { return free_; }
  [[nodiscard]] const ExtentMap& free() const { return free_; }
  // Bytes that could be allocated next to each other if `more` were mapped.
  [[nodiscard]] Bytes largest_with(Bytes more) const;

 private:
  struct Span {
    std::uint64_t first = 0, end = 0;
  };
  // The chunks that lie wholly in a free extent; none in the one that the growth extends.
  [[nodiscard]] Span whole_chunks(const Extent& extent, const Growth* avoid) const;
  // From `offset` to the next chunk or the end of the range; none where a chunk is mapped.
  [[nodiscard]] Bytes unmapped_from(std::uint64_t offset) const;

  Device* device_;
  Reservation* reservation_;
  Address base_;
  Bytes size_;
  ChunkSize chunk_;
  std::map<std::uint64_t, PhysicalPiece> chunks_;
  ExtentMap free_;
};

}  // namespace terrace
