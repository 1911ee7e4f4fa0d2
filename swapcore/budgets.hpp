// The byte limits of one process: what policy, device and lease come to.
#pragma once

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

}  // namespace terrace
