// The whole of a pool's memory, byte for byte, against what its structures say of it.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "allocator/block.hpp"
#include "runtime/result.hpp"

namespace terrace {

class HbmCentre;

// What a clean walk found.
struct HeapWalk {
  Bytes mapped;  // live + cached + free
  Bytes live;
  Bytes cached;  // in threads' caches
  Bytes free;
  std::uint64_t live_blocks = 0;
  std::uint64_t cached_blocks = 0;
  std::uint64_t free_extents = 0;
  std::array<Bytes, kPoolCount> live_by_pool{};
};

// Walks every mapped chunk. `cached` are the blocks in caches, by address, with their spans. Errors:
// kInvalidArgument, saying what is wrong and where. Precondition: nothing moves meanwhile.
[[nodiscard]] Result<HeapWalk> walk_heap(HbmCentre& centre, const std::map<Address, Bytes>& cached);

}  // namespace terrace
