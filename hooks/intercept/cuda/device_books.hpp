// What the management library (NVML) has in its books about a device's memory, process by process.
#pragma once

#include "hooks/intercept/wall.hpp"

namespace terrace::hooks::cuda {

// Loads the library and starts it, once in a process. With no lock of ours held: to load one takes the
// loader's lock, under which other threads' libraries start, and allocate. Milliseconds.
void open_books() noexcept;

// What this process holds there, its contexts' own bytes included. None: the books are not open, there is no
// such library here, or it does not list this process by the number that it has here. Milliseconds.
[[nodiscard]] std::optional<Bytes> held_by_this_process(const DeviceFacts& facts) noexcept;

}  // namespace terrace::hooks::cuda
