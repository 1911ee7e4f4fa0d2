#include "allocator/heap_walk.hpp"

#include <cstdio>
#include <string>

#include "allocator/hbm_centre.hpp"

namespace terrace {
namespace {

Error wrong(const std::string& what, Address at) {
  std::array<char, 32> where{};
  std::snprintf(where.data(), where.size(), "%p", static_cast<void*>(at));
  return {.code = Errc::kInvalidArgument, .text = "heap walk: " + what + " at " + where.data()};
}

class Walker {
 public:
  Walker(HbmCentre& centre, const std::map<Address, Bytes>& cached) : centre_(centre), cached_(cached) {}

  Status visit(const ChunkRange& range) {
    std::size_t free_seen = 0;
    const auto& chunks = range.chunks();
    for (auto chunk = chunks.begin(); chunk != chunks.end();) {
      const std::uint64_t at = chunk->first;
      std::uint64_t end = at;
      for (; chunk != chunks.end() && chunk->first == end; ++chunk) end += chunk->second.size.count();
      if (auto fine = visit_run(range, at, end, free_seen); !fine) return fine;
      found_.mapped += Bytes(end - at);
    }
    if (free_seen != range.free().by_offset().size()) {
      return wrong("a free extent lies where nothing is mapped, in the range", range.address_of(0));
    }
    return {};
  }

  [[nodiscard]] const HeapWalk& found() const { return found_; }

 private:
  // From chunk to chunk: at each place a free extent starts, or a block.
  Status visit_run(const ChunkRange& range, std::uint64_t at, std::uint64_t end, std::size_t& free_seen) {
    const auto& extents = range.free().by_offset();
    bool after_free = false;
    while (at < end) {
      const Address address = range.address_of(at);
      const BlockWord word = centre_.table().word_at(address);
      const auto extent = extents.find(at);
      const bool free = extent != extents.end();
      if (free && word.bits() != 0) return wrong("a block starts in free memory", address);
      if (!free && word.bits() == 0) return wrong("memory belongs to nobody", address);
      if (free && after_free) return wrong("two free extents were not joined", address);
      const std::uint64_t next = free ? extent->second.end() : at + word.span().count();
      if (next <= at || next > end) return wrong("a range reaches past what is mapped", address);
      if (const auto below = extents.upper_bound(at);
          !free && below != extents.end() && below->first < next) {
        return wrong("free memory starts inside the block", address);
      }
      if (free) {
        ++free_seen;
        ++found_.free_extents;
        found_.free += extent->second.size;
      } else if (auto fine = count(address, word); !fine) {
        return fine;
      }
      after_free = free;
      at = next;
    }
    return {};
  }

  Status count(Address address, BlockWord word) {
    const auto cached = cached_.find(address);
    if (word.state() == BlockWord::State::kCached) {
      if (cached == cached_.end()) return wrong("a cached block is in no cache", address);
      if (cached->second != word.span()) return wrong("a cached block is kept under another size", address);
      ++found_.cached_blocks;
      found_.cached += word.span();
      return {};
    }
    if (cached != cached_.end()) return wrong("a live block is in a cache", address);
    const auto block = centre_.table().find(address + word.span().count() - 1);
    if (!block || block->address != address) return wrong("the last byte is not found in its block", address);
    ++found_.live_blocks;
    found_.live += word.span();
    found_.live_by_pool[static_cast<std::size_t>(word.pool())] += word.span();
    return {};
  }

  HbmCentre& centre_;
  const std::map<Address, Bytes>& cached_;
  HeapWalk found_;
};

}  // namespace

Result<HeapWalk> walk_heap(HbmCentre& centre, const std::map<Address, Bytes>& cached) {
  Walker walker(centre, cached);
  for (const ChunkRange& range : centre.ranges()) {
    if (auto fine = walker.visit(range); !fine) return fine.error();
  }
  const HeapWalk& found = walker.found();
  if (found.cached_blocks != cached.size()) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "heap walk: caches hold " + std::to_string(cached.size()) +
                         " blocks, of which only " + std::to_string(found.cached_blocks) +
                         " lie in mapped memory"};
  }
  if (found.mapped != centre.mapped()) {
    return Error{.code = Errc::kInvalidArgument,
                 .text = "heap walk: " + format_bytes(found.mapped) + " are mapped, not " +
                         format_bytes(centre.mapped())};
  }
  return found;
}

}  // namespace terrace
