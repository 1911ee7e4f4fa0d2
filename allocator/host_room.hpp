// Why host memory is refused: which of the limits on it leaves least.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/memory_limits.hpp"

namespace terrace {

// Whether RLIMIT_MEMLOCK does not bind this process (CAP_IPC_LOCK).
[[nodiscard]] bool may_lock_any_amount();

enum class LockLimit : std::uint8_t { kIgnored, kCounts };

// "the control group leaves least: 12.0 MiB (the machine 3.1 GiB, the control group 12.0 MiB)".
// RLIMIT_MEMLOCK takes part where it counts: the memory is to be locked by the kernel's own account, and the
// limit binds.
[[nodiscard]] std::string least_room(const MemoryLimits& limits, LockLimit lock_limit);

// Touching more than there is ends in the out-of-memory killer, so it is asked before. Errors: kOutOfMemory.
[[nodiscard]] Status room_for(Bytes size, const MemoryLimits& limits);

}  // namespace terrace
