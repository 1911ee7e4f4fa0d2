// IoEngine by io_uring: requests enter the kernel at once and end in any order; no thread is ours.
#pragma once

#include "allocator/tiers/io_engine.hpp"

namespace terrace {

// Errors: kNotSupported (the kernel is too old, or a sandbox or limit refuses io_uring), kOutOfMemory.
[[nodiscard]] Result<std::unique_ptr<IoEngine>> open_ring_engine(unsigned depth);

}  // namespace terrace
