// What the management library (NVML) has in its books about a device's memory, process by process.
#pragma once

#include "hooks/intercept/wall.hpp"

namespace terrace::hooks::cuda {

// What this process holds there, its contexts' own bytes included. None: no such library here, or it does not
// list this process by the number that it has here. Opens the library with the first call; milliseconds.
[[nodiscard]] std::optional<Bytes> held_by_this_process(const DeviceFacts& facts) noexcept;

}  // namespace terrace::hooks::cuda
