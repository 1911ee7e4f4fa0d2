#include "allocator/extent_map.hpp"

#include <algorithm>
#include <iterator>

#include "runtime/assert.hpp"

namespace terrace {

void ExtentMap::add(const Extent& extent) {
  by_offset_.emplace(extent.offset, extent);
  by_size_.emplace(extent.size.count(), extent.offset);
  total_ += extent.size;
}

void ExtentMap::erase(std::map<std::uint64_t, Extent>::iterator it) {
  total_ -= it->second.size;
  by_size_.erase({it->second.size.count(), it->first});
  by_offset_.erase(it);
}

void ExtentMap::insert(Extent extent) {
  if (extent.size == 0_B) return;
  auto next = by_offset_.lower_bound(extent.offset);
  if (next != by_offset_.begin()) {
    auto previous = std::prev(next);
    TERRACE_CHECK(previous->second.end() <= extent.offset, "a range is freed once");
    if (previous->second.end() == extent.offset) {
      extent.offset = previous->first;
      extent.size += previous->second.size;
      extent.pending |= previous->second.pending;
      extent.sequence = std::max(extent.sequence, previous->second.sequence);
      erase(previous);
    }
  }
  if (next != by_offset_.end()) {
    TERRACE_CHECK(extent.end() <= next->first, "a range is freed once");
    if (extent.end() == next->first) {
      extent.size += next->second.size;
      extent.pending |= next->second.pending;
      extent.sequence = std::max(extent.sequence, next->second.sequence);
      erase(next);
    }
  }
  add(extent);
}

std::optional<Extent> ExtentMap::best_fit(Bytes size) const {
  auto it = by_size_.lower_bound({size.count(), 0});
  if (it == by_size_.end()) return std::nullopt;
  return by_offset_.at(it->second);
}

std::optional<Extent> ExtentMap::ending_at(std::uint64_t end) const {
  auto it = by_offset_.lower_bound(end);
  if (it == by_offset_.begin()) return std::nullopt;
  --it;
  if (it->second.end() != end) return std::nullopt;
  return it->second;
}

Extent ExtentMap::take(std::uint64_t offset, Bytes size) {
  auto it = by_offset_.upper_bound(offset);
  TERRACE_CHECK(it != by_offset_.begin(), "the range taken is free");
  --it;
  const Extent whole = it->second;
  TERRACE_CHECK(offset + size.count() <= whole.end(), "the range taken is free");
  erase(it);
  if (offset > whole.offset) {
    add({whole.offset, Bytes(offset - whole.offset), whole.pending, whole.sequence});
  }
  if (const std::uint64_t end = offset + size.count(); end < whole.end()) {
    add({end, Bytes(whole.end() - end), whole.pending, whole.sequence});
  }
  return {offset, size, whole.pending, whole.sequence};
}

Bytes ExtentMap::largest() const { return by_size_.empty() ? 0_B : Bytes(by_size_.rbegin()->first); }

}  // namespace terrace
