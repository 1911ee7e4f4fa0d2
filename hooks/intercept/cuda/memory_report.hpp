// What cudaMemGetInfo and cuMemGetInfo say in a process that has a budget (hook.report of the policy).
#pragma once

#include <cstddef>

#include "hooks/intercept/cuda/abi.hpp"

namespace terrace::hooks::cuda {

// Turns what the driver said of a device into what its user is told. physical: no more is free than the
// budget leaves; extended: the ddr budget on top of free and total. What the pool of this process holds and
// does not use is free in either.
void report_memory(DeviceOrdinal device, std::size_t& available, std::size_t& total) noexcept;

}  // namespace terrace::hooks::cuda
