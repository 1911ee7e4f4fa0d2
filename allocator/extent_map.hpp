// The free part of a range, as coalesced extents with best fit.
//
// Offsets and sizes are in bytes. Each extent remembers which streams (a bit each, meaning given by the
// owner) may still be using it; coalescing joins the bits. Not thread-safe: the owning pool locks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "runtime/units.hpp"

namespace terrace {

struct Extent {
  std::uint64_t offset = 0;
  Bytes size;
  std::uint64_t pending = 0;  // streams that freed into it and may not have passed that point
  [[nodiscard]] std::uint64_t end() const { return offset + size.count(); }
};

class ExtentMap {
 public:
  // Adds a free range, joined with the neighbours it touches. Overlap with a free range is a programmer
  // error.
  void insert(Extent extent);
  // The smallest extent of at least `size`, lowest offset first among equals; it stays in the map.
  [[nodiscard]] std::optional<Extent> best_fit(Bytes size) const;
  // The free extent that ends exactly at `end`, if any.
  [[nodiscard]] std::optional<Extent> ending_at(std::uint64_t end) const;
  // Takes [offset, offset + size) out; it lies within one extent, whose rest stays. Returns what was taken.
  Extent take(std::uint64_t offset, Bytes size);
  [[nodiscard]] Bytes total() const { return total_; }
  [[nodiscard]] Bytes largest() const;
  [[nodiscard]] const std::map<std::uint64_t, Extent>& by_offset() const { return by_offset_; }

 private:
  void add(const Extent& extent);
  void erase(std::map<std::uint64_t, Extent>::iterator it);

  std::map<std::uint64_t, Extent> by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // (size, offset)
  Bytes total_;
};

}  // namespace terrace
