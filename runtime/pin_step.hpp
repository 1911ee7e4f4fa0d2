// Where two pinned ranges may meet under one copy.
//
// Large host memory is pinned in pieces, each a registration of its own with the driver, so that pinning
// overlaps with the first touch of what follows. Neighbouring pieces meet only at addresses that are
// multiples of kPinStep. CUDA refuses a copy whose host range spans two registrations (driver 580: invalid
// argument); a device that needs it cuts copies at these addresses, and nobody above has to know.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "runtime/units.hpp"

namespace terrace {

inline constexpr Bytes kPinStep = 64_MiB;

// What of [host, host + size) lies before the next multiple of kPinStep; at most `size`.
[[nodiscard]] inline Bytes up_to_pin_step(const std::byte* host, Bytes size) {
  const std::uint64_t within = reinterpret_cast<std::uintptr_t>(host) % kPinStep.count();
  return std::min(size, Bytes(kPinStep.count() - within));
}

}  // namespace terrace
