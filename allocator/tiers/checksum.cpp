#include "allocator/tiers/checksum.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace terrace {

std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace terrace
