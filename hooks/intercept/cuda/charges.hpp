// What an allocation takes of a device, before the driver is asked.
#pragma once

#include <algorithm>

#include "hooks/intercept/cuda/abi.hpp"
#include "runtime/units.hpp"

namespace terrace::hooks::cuda {

// A driver hands out large blocks in pages of 2 MiB; small ones share a page, cut in 512 bytes.
inline constexpr Bytes kPage = 2_MiB;
[[nodiscard]] constexpr Bytes charge_for(Bytes size) {
  return size >= kPage / 2 ? round_up(size, kPage) : round_up(std::max(size, 1_B), 512_B);
}

// Rows of a pitched allocation begin at multiples of this on every GPU so far.
inline constexpr Bytes kPitchStep = 512_B;
[[nodiscard]] constexpr Bytes pitched_bytes(std::size_t width, std::size_t height) {
  return round_up(Bytes(width), kPitchStep) * height;
}

[[nodiscard]] constexpr std::uint64_t element_bytes(int format) {
  switch (format) {  // CUarray_format
    case 0x01:
    case 0x08:
      return 1;
    case 0x02:
    case 0x09:
    case 0x10:
      return 2;
    default:  // the widest, also for formats that are compressed
      return 4;
  }
}
[[nodiscard]] constexpr Bytes array_bytes(const Array3dDescriptor& what) {
  const auto rows = std::max<std::uint64_t>(what.height, 1) * std::max<std::uint64_t>(what.depth, 1);
  return Bytes(what.width * rows * what.channels * element_bytes(what.format));
}
[[nodiscard]] constexpr Bytes array_bytes(const ArrayDescriptor& what) {
  return array_bytes(Array3dDescriptor{what.width, what.height, 0, what.format, what.channels, 0});
}
// All the smaller levels of a mipmap together are a third of the first, at most a whole in one dimension.
[[nodiscard]] constexpr Bytes array_bytes(const Array3dDescriptor& what, unsigned levels) {
  const Bytes first = array_bytes(what);
  return levels <= 1 ? first : first * (what.height > 1 ? 4 : 6) / 3;
}

}  // namespace terrace::hooks::cuda
