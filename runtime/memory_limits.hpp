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
  // What is left now, before somebody is killed for memory: MemAvailable (MemTotal where the system does not
  // say), and the least that a limited control group can still take, its file cache counted as free. Nothing:
  // no group has a limit.
  Bytes machine_left{};
  std::optional<Bytes> group_left{};
};

// Read anew at each call: control groups change. `root` is where proc and sys/fs/cgroup are found; a test
// brings its own. Errors: kIo (no readable proc/meminfo there).
[[nodiscard]] Result<MemoryLimits> memory_limits(const std::filesystem::path& root = "/");

}  // namespace terrace
