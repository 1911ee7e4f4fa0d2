// How bytes are known again: a 64-bit hash that runs at memory speed. Against accidents, not against people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace terrace {

// Bytes that differ, or are hashed under another seed, give another value but once in 2^64.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed);

}  // namespace terrace
