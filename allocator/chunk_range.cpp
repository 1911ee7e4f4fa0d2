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

ChunkRange::ChunkRange(Device& device, Reservation& reservation, const Place& place)
    : device_(&device),
      reservation_(&reservation),
      base_(reservation.base() + place.offset),
      size_(place.size),
      chunk_(place.chunk),
      chunks_(place.size / place.chunk) {}

ChunkRange::ChunkRange(ChunkRange&& other) noexcept
    : device_(other.device_),
      reservation_(other.reservation_),
      base_(other.base_),
      size_(other.size_),
      chunk_(other.chunk_),
      chunks_(std::exchange(other.chunks_, {})),
      free_(std::move(other.free_)) {}

ChunkRange::~ChunkRange() {
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (!chunks_[i]) continue;
    const Address at = base_ + i * chunk_.count();
    // A call that fails may succeed when asked again; twice, and the device is lost with all its memory.
    if (device_->unmap(at, chunk_) || device_->unmap(at, chunk_)) {
      device_->destroy_physical(*chunks_[i]);
    } else {
      reservation_->abandon();
    }
  }
}

std::size_t ChunkRange::unmapped_run(std::size_t first, std::size_t wanted) const {
  std::size_t run = 0;
  while (run < wanted && first + run < chunks_.size() && !chunks_[first + run]) ++run;
  return run;
}

std::optional<ChunkRange::Growth> ChunkRange::plan_growth(Bytes size) const {
  std::optional<Growth> best;
  const auto consider = [&](std::uint64_t offset, std::size_t first, Bytes missing) {
    const std::size_t wanted = round_up(missing, chunk_) / chunk_;
    if (best && best->chunks <= wanted) return;
    if (unmapped_run(first, wanted) == wanted) best = Growth{offset, first, wanted};
  };
  for (const auto& [offset, extent] : free_.by_offset()) {
    if (extent.end() % chunk_.count() == 0)
      consider(offset, extent.end() / chunk_.count(), size - extent.size);
  }
  for (std::size_t i = 0; i < chunks_.size() && !best; ++i) {
    if (!chunks_[i]) consider(i * chunk_.count(), i, size);
  }
  return best;
}

Status ChunkRange::map_chunks(std::size_t first, std::span<const Physical> pieces) {
  const std::uint64_t offset = first * chunk_.count();
  if (auto mapped = device_->map_all(base_ + offset, pieces, chunk_); !mapped) return mapped;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    TERRACE_CHECK(!chunks_[first + i], "a chunk is mapped once");
    chunks_[first + i] = pieces[i];
  }
  free_.insert({offset, chunk_ * pieces.size(), 0});
  return {};
}

ChunkRange::Chunks ChunkRange::whole_chunks(const Extent& extent, const Growth* avoid) const {
  if (avoid != nullptr && extent.offset <= avoid->offset && avoid->offset < extent.end()) return {};
  const std::size_t first = round_up(Bytes(extent.offset), chunk_) / chunk_;
  const std::size_t end = round_down(Bytes(extent.end()), chunk_) / chunk_;
  return first < end ? Chunks{first, end} : Chunks{};
}

std::size_t ChunkRange::free_chunks(const Growth* avoid) const {
  std::size_t count = 0;
  for (const auto& [offset, extent] : free_.by_offset()) {
    const Chunks whole = whole_chunks(extent, avoid);
    count += whole.end - whole.first;
  }
  return count;
}

const Extent& ChunkRange::extent_of(std::size_t index) const {
  auto it = free_.by_offset().upper_bound(index * chunk_.count());
  TERRACE_CHECK(it != free_.by_offset().begin(), "the chunk is free");
  return std::prev(it)->second;
}

Result<Physical> ChunkRange::unmap_chunk(std::size_t index) {
  TERRACE_CHECK(chunks_[index].has_value(), "the chunk is mapped");
  const std::uint64_t offset = index * chunk_.count();
  if (auto unmapped = device_->unmap(base_ + offset, chunk_); !unmapped) return unmapped.error();
  free_.take(offset, chunk_);
  return *std::exchange(chunks_[index], std::nullopt);
}

bool ChunkRange::holds(const std::byte* address) const {
  return address >= base_ && address < base_ + size_.count();
}

std::uint64_t ChunkRange::offset_of(const std::byte* address) const {
  return static_cast<std::uint64_t>(address - base_);
}

Bytes ChunkRange::largest_with(std::size_t chunks) const {
  Bytes best = free_.largest();
  const Bytes more = chunk_ * chunks;
  best = std::max(best, std::min(more, size_));
  for (const auto& [offset, extent] : free_.by_offset()) {
    if (extent.end() % chunk_.count() != 0) continue;
    best = std::max(best, extent.size + chunk_ * unmapped_run(extent.end() / chunk_.count(), chunks));
  }
  return best;
}

}  // namespace terrace
