// The byte limits of one process: what policy, device and lease come to. Where its pinned memory goes.
#pragma once

#include <vector>

#include "runtime/device.hpp"
#include "runtime/result.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {

struct Budgets {
  Bytes hbm;           // everything the process holds in HBM
  Bytes ddr;           // everything it pins
  Bytes swapcore_hbm;  // the most that cached outputs may hold
  Bytes swapcore_ddr;
  Bytes checkpoint;  // the most HBM that saved activations and cached outputs may hold together
};

// `host_limit`: what the cgroup and the machine allow a process. Errors: kInvalidArgument naming the key,
// what it came to and what would be accepted.
[[nodiscard]] Result<Budgets> resolve_budgets(const Policy& policy, const DeviceInfo& device,
                                              Bytes host_limit);

// The NUMA nodes that pinned memory goes to; none: wherever first touch puts it. A machine that hwloc can't
// read has one such place. Errors: kInvalidArgument where the policy names a node that is not there.
[[nodiscard]] Result<std::vector<int>> numa_nodes_of(const DeviceInfo& device, const Policy& policy);

}  // namespace terrace
