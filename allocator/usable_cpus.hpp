// The processors on which this process may run threads of its own: its affinity mask, its control groups'
// quota, and, where memory is wanted on one NUMA node, the processors beside it.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

namespace terrace {

struct UsableCpus {
  std::vector<int> cpus;  // by the system's number; never empty
  int threads = 1;        // that can run at once: the number of cpus, or the quota where that is less
};

// Read anew at each call. A node whose processors this process may not use, or that has none, does not narrow
// the list. `root` is where proc and sys/fs/cgroup are found; a test brings its own.
[[nodiscard]] UsableCpus usable_cpus(std::optional<int> numa_node = {},
                                     const std::filesystem::path& root = "/");

}  // namespace terrace
