// A forked child starts without what its parent knows of its device: pools, physical memory, captures.
#pragma once

namespace terrace::hooks::cuda {

// Called before the first thing is known; again is cheap.
void watch_forks() noexcept;

}  // namespace terrace::hooks::cuda
