#include "allocator/chunk_range.hpp"

#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"

namespace terrace {

Result<ChunkRange> ChunkRange::create(Device& device, Bytes size, Bytes chunk) {
  auto base = device.reserve(size);
  if (!base) return std::move(base).error();
  return ChunkRange(device, *base, size, chunk);
}

ChunkRange::ChunkRange(Device& device, Address base, Bytes size, Bytes chunk)
    : device_(&device), base_(base), size_(size), chunk_(chunk), chunks_(size / chunk) {}

ChunkRange::ChunkRange(ChunkRange&& other) noexcept
    : device_(other.device_),
      base_(std::exchange(other.base_, nullptr)),
      size_(other.size_),
      chunk_(other.chunk_),
      chunks_(std::move(other.chunks_)),
      free_(std::move(other.free_)) {}

ChunkRange::~ChunkRange() {
  if (base_ == nullptr) return;
  bool empty = true;
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    if (!chunks_[i]) continue;
    const Address at = base_ + i * chunk_.count();
    // A call that fails may succeed when asked again; twice, and the device is lost with all its memory.
    if (device_->unmap(at, chunk_) || device_->unmap(at, chunk_)) {
      device_->destroy_physical(*chunks_[i]);
    } else {
      empty = false;
    }
  }
  if (empty) device_->release(base_, size_);
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

Status ChunkRange::map_chunk(std::size_t index, Physical physical) {
  TERRACE_CHECK(!chunks_[index], "a chunk is mapped once");
  const std::uint64_t offset = index * chunk_.count();
  if (auto mapped = device_->map(base_ + offset, physical, chunk_); !mapped) return mapped;
  chunks_[index] = physical;
  free_.insert({offset, chunk_, 0});
  return {};
}

std::optional<std::size_t> ChunkRange::free_chunk(const Growth* avoid) const {
  const auto& extents = free_.by_offset();
  for (auto it = extents.rbegin(); it != extents.rend(); ++it) {
    const std::uint64_t first = round_up(Bytes(it->second.offset), chunk_) / chunk_;
    const std::uint64_t last = round_down(Bytes(it->second.end()), chunk_) / chunk_;
    // A growth extends the free extent it starts in: that one must stay.
    if (avoid != nullptr && it->second.offset <= avoid->offset && avoid->offset < it->second.end()) continue;
    if (first < last) return last - 1;
  }
  return std::nullopt;
}

std::uint64_t ChunkRange::pending_in(std::size_t index) const {
  auto it = free_.by_offset().upper_bound(index * chunk_.count());
  TERRACE_CHECK(it != free_.by_offset().begin(), "the chunk is free");
  return std::prev(it)->second.pending;
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
