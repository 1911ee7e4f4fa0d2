#include "runtime/trace/live_ids.hpp"

#include <sys/mman.h>

#include "runtime/fault.hpp"

namespace terrace::trace {
namespace {

constexpr std::size_t kSlots = 2 * kMostLiveBlocks;
constexpr std::size_t kMask = kSlots - 1;
static_assert((kSlots & kMask) == 0);

// Blocks are spread by hash, but in runs of 64 KiB of addresses: few blocks touch few pages.
std::size_t home_of(std::uint64_t address) {
  std::uint64_t run = address >> 16;
  run = (run ^ (run >> 15)) * 0xbf58476d1ce4e5b9ULL;
  run ^= run >> 29;
  return (run * 128 + (address >> 9 & 127)) & kMask;
}

}  // namespace

bool LiveIds::map_slots() noexcept {
  if (slots_ != nullptr) return true;
  if (fault_point(FaultPoint::kHostMap)) return false;
  void* memory = mmap(nullptr, kSlots * sizeof(Slot), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  slots_ = static_cast<Slot*>(memory);
  return true;
}

bool LiveIds::put(std::uint64_t address, std::uint64_t id) noexcept {
  if (size_ == kMostLiveBlocks || !map_slots()) return false;
  std::size_t at = home_of(address);
  while (slots_[at].address != 0) at = (at + 1) & kMask;
  slots_[at] = {address, id};
  ++size_;
  return true;
}

std::optional<std::uint64_t> LiveIds::take(std::uint64_t address) noexcept {
  if (slots_ == nullptr || address == 0) return std::nullopt;
  std::size_t gap = home_of(address);
  while (slots_[gap].address != address) {
    if (slots_[gap].address == 0) return std::nullopt;
    gap = (gap + 1) & kMask;
  }
  const std::uint64_t id = slots_[gap].id;
  // Later entries of the probe chain move up, so that no tombstones gather.
  for (std::size_t at = (gap + 1) & kMask; slots_[at].address != 0; at = (at + 1) & kMask) {
    const std::size_t home = home_of(slots_[at].address);
    if (((at - home) & kMask) < ((at - gap) & kMask)) continue;
    slots_[gap] = slots_[at];
    gap = at;
  }
  slots_[gap] = {};
  --size_;
  return id;
}

void LiveIds::clear() noexcept {
  if (slots_ != nullptr) madvise(slots_, kSlots * sizeof(Slot), MADV_DONTNEED);
  size_ = 0;
}

}  // namespace terrace::trace
