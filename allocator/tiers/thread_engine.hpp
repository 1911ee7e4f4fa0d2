// IoEngine by a few threads with pread and pwrite: what works on every kernel and in every sandbox.
#pragma once

#include "allocator/tiers/io_engine.hpp"

namespace terrace {

// Errors: kOutOfMemory (no file descriptor or thread left).
[[nodiscard]] Result<std::unique_ptr<IoEngine>> open_thread_engine();

}  // namespace terrace
