#include "allocator/usable_cpus.hpp"

#include <numa.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

#include "runtime/control_groups.hpp"

namespace terrace {
namespace {

namespace fs = std::filesystem;

// Processors' worth of time that the groups allow; nothing: no quota.
std::optional<double> quota(const fs::path& root) {
  std::optional<double> least;
  for (const ControlGroup& group : control_groups(root, "cpu")) {
    double share = 0;
    double period = 0;
    if (group.version == 1) {
      std::ifstream(group.folder / "cpu.cfs_quota_us") >> share;
      std::ifstream(group.folder / "cpu.cfs_period_us") >> period;
    } else {
      std::ifstream(group.folder / "cpu.max") >> share >> period;  // "max" reads as no number
    }
    if (share > 0 && period > 0) least = std::min(least.value_or(share / period), share / period);
  }
  return least;
}

// Not libnuma's own answer, which follows the affinity of the thread that first asked.
std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.push_back(cpu);
    }
  }
  // A mask larger than cpu_set_t cannot be read into one.
  for (int cpu = 0; cpus.empty() && cpu < static_cast<int>(std::thread::hardware_concurrency()); ++cpu) {
    cpus.push_back(cpu);
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

std::vector<int> beside(int numa_node, const std::vector<int>& allowed) {
  std::vector<int> near;
  // Asked first: of a node that is not there libnuma complains on stderr.
  if (numa_available() < 0 || numa_node < 0 ||
      numa_bitmask_isbitset(numa_nodes_ptr, static_cast<unsigned>(numa_node)) == 0) {
    return near;
  }
  bitmask* mask = numa_allocate_cpumask();
  if (numa_node_to_cpus(numa_node, mask) == 0) {
    for (const int cpu : allowed) {
      if (numa_bitmask_isbitset(mask, static_cast<unsigned>(cpu)) != 0) near.push_back(cpu);
    }
  }
  numa_free_cpumask(mask);
  return near;
}

}  // namespace

UsableCpus usable_cpus(std::optional<int> numa_node, const fs::path& root) {
  UsableCpus usable{.cpus = allowed_cpus()};
  if (numa_node) {
    if (auto near = beside(*numa_node, usable.cpus); !near.empty()) usable.cpus = std::move(near);
  }
  usable.threads = static_cast<int>(usable.cpus.size());
  if (const auto share = quota(root)) {
    usable.threads = std::clamp(static_cast<int>(std::ceil(*share)), 1, usable.threads);
  }
  return usable;
}

}  // namespace terrace
