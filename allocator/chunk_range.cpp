#include "allocator/chunk_range.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"

namespace terrace {

Result<Reservation> Reservation::make(Device& device, Bytes size) {
  auto base = device.reserve(size);
  if (!base) return std::move(base).error();
  return Reservation(device, *base, size);
}

ChunkRange::ChunkRange(Device& device, Reservation& reservation, const Place& place, const ChunkSize& chunk)
    : device_(&device),
      reservation_(&reservation),
      base_(reservation.base() + place.offset),
      size_(place.size),
      chunk_(chunk) {}

ChunkRange::ChunkRange(ChunkRange&& other) noexcept
    : device_(other.device_),
      reservation_(other.reservation_),
      base_(other.base_),
      size_(other.size_),
      chunk_(other.chunk_),
      chunks_(std::exchange(other.chunks_, {})),
      free_(std::move(other.free_)) {}

ChunkRange::~ChunkRange() {
  for (const auto& [offset, chunk] : chunks_) {
    const Address at = base_ + offset;
    // A call that fails may succeed when asked again; twice, and the device is lost with all its memory.
    if (device_->unmap(at, chunk.size) || device_->unmap(at, chunk.size)) {
      device_->destroy_physical(chunk.physical);
    } else {
      reservation_->abandon();
    }
  }
}

Bytes ChunkRange::unmapped_from(std::uint64_t offset) const {
  const auto next = chunks_.lower_bound(offset);
  if (next != chunks_.begin()) {
    const auto& [before, chunk] = *std::prev(next);
    if (before + chunk.size.count() > offset) return 0_B;
  }
  return Bytes((next == chunks_.end() ? size_.count() : next->first) - offset);
}

std::optional<ChunkRange::Growth> ChunkRange::plan_growth(Bytes size) const {
  std::optional<Growth> best;
  const auto consider = [&](std::uint64_t offset, std::uint64_t first, Bytes lacking) {
    const Bytes missing = round_up(lacking, chunk_.least);
    if (best && best->missing <= missing) return;
    const Bytes room = missing + (chunk_.most - chunk_.least);
    if (unmapped_from(first) >= room) best = Growth{offset, first, missing, room};
  };
  for (const auto& [offset, extent] : free_.by_offset()) consider(offset, extent.end(), size - extent.size);
  std::uint64_t gap = 0;
  for (auto next = chunks_.begin(); !best; ++next) {
    consider(gap, gap, size);
    if (next == chunks_.end()) break;
    gap = next->first + next->second.size.count();
  }
  return best;
}

Status ChunkRange::map_chunks(std::uint64_t first, std::span<const PhysicalPiece> chunks) {
  const Bytes whole = whole_size(chunks);
  TERRACE_CHECK(unmapped_from(first) >= whole, "a chunk is mapped where none is");
  if (auto mapped = device_->map_all(base_ + first, chunks); !mapped) return mapped;
  free_.insert({first, whole, 0});
  for (const PhysicalPiece& chunk : chunks) {
    chunks_.emplace(first, chunk);
    first += chunk.size.count();
  }
  return {};
}

ChunkRange::Span ChunkRange::whole_chunks(const Extent& extent, const Growth* avoid) const {
  if (avoid != nullptr && extent.offset <= avoid->offset && avoid->offset < extent.end()) return {};
  // Whatever is free is mapped: a chunk holds the extent's last byte.
  const auto first = chunks_.lower_bound(extent.offset);
  const auto last = std::prev(chunks_.upper_bound(extent.end() - 1));
  const std::uint64_t last_end = last->first + last->second.size.count();
  const std::uint64_t end = last_end == extent.end() ? last_end : last->first;
  return first != chunks_.end() && first->first < end ? Span{first->first, end} : Span{};
}

Bytes ChunkRange::free_chunk_bytes(const Growth* avoid) const {
  Bytes sum;
  for (const auto& [offset, extent] : free_.by_offset()) {
    const Span whole = whole_chunks(extent, avoid);
    sum += Bytes(whole.end - whole.first);
  }
  return sum;
}

const Extent& ChunkRange::extent_of(std::uint64_t chunk) const {
  auto it = free_.by_offset().upper_bound(chunk);
  TERRACE_CHECK(it != free_.by_offset().begin(), "the chunk is free");
  return std::prev(it)->second;
}

Result<PhysicalPiece> ChunkRange::unmap_chunk(std::uint64_t chunk) {
  const auto mapped = chunks_.find(chunk);
  TERRACE_CHECK(mapped != chunks_.end(), "the chunk is mapped");
  const PhysicalPiece piece = mapped->second;
  if (auto unmapped = device_->unmap(base_ + chunk, piece.size); !unmapped) return unmapped.error();
  free_.take(chunk, piece.size);
  chunks_.erase(mapped);
  return piece;
}

bool ChunkRange::holds(const std::byte* address) const {
  return address >= base_ && address < base_ + size_.count();
}

std::uint64_t ChunkRange::offset_of(const std::byte* address) const {
  return static_cast<std::uint64_t>(address - base_);
}

Bytes ChunkRange::largest_with(Bytes more) const {
  Bytes best = std::max(free_.largest(), std::min(more, size_));
  for (const auto& [offset, extent] : free_.by_offset()) {
    best = std::max(best, extent.size + std::min(more, unmapped_from(extent.end())));
  }
  return best;
}

}  // namespace terrace
