// Sums of what processes say of themselves: whatever they say, a sum does not start again at zero.
#pragma once

#include <cstdint>

namespace terrace {

[[nodiscard]] constexpr std::uint64_t saturating_add(std::uint64_t a, std::uint64_t b) {
  return a + b < a ? UINT64_MAX : a + b;
}

}  // namespace terrace
