// The free part of a range, as coalesced extents with best fit.
//
// Offsets and sizes are in bytes. Each extent remembers which streams (a bit each, meaning given by the
// owner) may still be using it, and since when; coalescing joins the bits and keeps the later time. Not
// thread-safe: the owning pool locks.
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
  std::uint64_t pending = 0;   // streams that freed into it and may not have passed that point
  std::uint64_t sequence = 0;  // of the newest of those frees, in the owner's counting
  [[nodiscard]] std::uint64_t end() const { return offset + size.count(); }
};

class ExtentMap {
 public:
  // Adds a free range, joined with the neighbours it touches. Overlap with a free range is a programmer
  // error.
  void insert(Extent extent);
  // The smallest extent of at least `size`, lowest offset first among equals; it stays in the map.
  [[nodiscard]] std::optional<Extent> best_fit(Bytes size) const;
  // Among the few lowest of the extents that best_fit() could give, all of one size, the first that
  // `preferred` likes; else what best_fit() gives.
  template <typename Preferred>
  [[nodiscard]] std::optional<Extent> best_fit(Bytes size, const Preferred& preferred) const {
    std::optional<Extent> best = best_fit(size);
    if (!best) return best;
    auto it = by_size_.find({best->size.count(), best->offset});
    for (int tries = 0; tries < kTries && it != by_size_.end() && it->first == best->size.count();
         ++tries, ++it) {
      const Extent& extent = by_offset_.at(it->second);
      if (preferred(extent)) return extent;
    }
    return best;
  }
  // The first extent of at least `size`, the smallest first, in which `fits` finds a place.
  template <typename Fits>
  [[nodiscard]] std::optional<Extent> first_fit(Bytes size, const Fits& fits) const {
    for (auto it = by_size_.lower_bound({size.count(), 0}); it != by_size_.end(); ++it) {
      const Extent& extent = by_offset_.at(it->second);
      if (fits(extent)) return extent;
    }
    return std::nullopt;
  }
  // The free extent that ends exactly at `end`, if any.
  [[nodiscard]] std::optional<Extent> ending_at(std::uint64_t end) const;
  // Takes [offset, offset + size) out; it lies within one extent, whose rest stays. Returns what was taken.
  Extent take(std::uint64_t offset, Bytes size);
  [[nodiscard]] Bytes total() const { return total_; }
  [[nodiscard]] Bytes largest() const;
  [[nodiscard]] const std::map<std::uint64_t, Extent>& by_offset() const { return by_offset_; }

 private:
  static constexpr int kTries = 8;
  void add(const Extent& extent);
  void erase(std::map<std::uint64_t, Extent>::iterator it);

  std::map<std::uint64_t, Extent> by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // (size, offset)
  Bytes total_;
};

}  // namespace terrace
