// How much host memory this process may use, whoever set the limit: the machine, a control group, the locked
// memory limit.
#pragma once

#include <filesystem>
#include <optional>

#include "runtime/result.hpp"

namespace terrace {

struct MemoryLimits {
  Bytes machine;                  // MemTotal
  Bytes usable;                   // the least of that and every control group above this process, v2 or v1
  std::optional<Bytes> lockable;  // RLIMIT_MEMLOCK; nothing: no limit
};

// Read anew at each call: control groups change. `root` is where proc and sys/fs/cgroup are found; a test
// brings its own. Errors: kIo (no readable proc/meminfo there).
[[nodiscard]] Result<MemoryLimits> memory_limits(const std::filesystem::path& root = "/");

}  // namespace terrace
