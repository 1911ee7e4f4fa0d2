#include "swapcore/budgets.hpp"

#include <algorithm>
#include <string>

#include "runtime/topology.hpp"

namespace terrace {
namespace {

Error too_large(const char* key, Bytes asked, const char* what, Bytes limit) {
  return Error{Errc::kInvalidArgument,
               std::string(key) + ": " + format_bytes(asked) + " is more than " + what + " (" +
                   format_bytes(limit) + "); use a size up to that, or a share like \"80%\"",
               asked,
               {}};
}

}  // namespace

Result<Budgets> resolve_budgets(const Policy& policy, const DeviceInfo& device, Bytes host_limit) {
  Budgets budgets;
  const Bytes reserve = policy.hbm.reserve.resolve(device.capacity, 2_GiB);
  const Bytes unreserved = saturating_sub(device.capacity, reserve);
  budgets.hbm = policy.hbm.budget.resolve(device.capacity, unreserved);
  if (budgets.hbm > device.capacity) {
    return too_large("hbm.budget", budgets.hbm, "the device has", device.capacity);
  }
  // A size is a decision; a share leaves the reserve alone.
  if (policy.hbm.budget.form != Amount::Form::kBytes) budgets.hbm = std::min(budgets.hbm, unreserved);
  if (budgets.hbm == 0_B) {
    return Error{Errc::kInvalidArgument,
                 "hbm.reserve: " + format_bytes(reserve) + " leaves nothing of the device's " +
                     format_bytes(device.capacity) + "; lower the reserve or give hbm.budget as a size",
                 reserve,
                 {}};
  }
  budgets.ddr = policy.ddr.budget.resolve(host_limit, host_limit / 2);
  if (budgets.ddr > host_limit)
    return too_large("ddr.budget", budgets.ddr, "this process may use", host_limit);
  budgets.swapcore_hbm = policy.swapcore.hbm_budget.resolve(budgets.hbm, budgets.hbm);
  if (budgets.swapcore_hbm > budgets.hbm) {
    return too_large("swapcore.hbm_budget", budgets.swapcore_hbm, "hbm.budget", budgets.hbm);
  }
  budgets.swapcore_ddr = policy.swapcore.ddr_budget.resolve(budgets.ddr, budgets.ddr);
  if (budgets.swapcore_ddr > budgets.ddr) {
    return too_large("swapcore.ddr_budget", budgets.swapcore_ddr, "ddr.budget", budgets.ddr);
  }
  budgets.checkpoint = policy.checkpoint.budget.resolve(budgets.hbm, budgets.hbm);
  if (budgets.checkpoint > budgets.hbm) {
    return too_large("checkpoint.budget", budgets.checkpoint, "hbm.budget", budgets.hbm);
  }
  return budgets;
}

Result<std::vector<int>> numa_nodes_of(const DeviceInfo& device, const Policy& policy) {
  const auto topology = Topology::of_this_machine();
  std::vector<int> present;
  if (topology) {
    for (const NumaNode& node : topology->nodes()) present.push_back(node.index);
  }
  switch (policy.ddr.numa) {
    case NumaMode::kInterleave:
      return present;
    case NumaMode::kNearest: {
      const auto near = topology && !device.pci.empty() ? topology->node_near(device.pci) : std::nullopt;
      return near ? std::vector<int>{*near} : std::vector<int>{};
    }
    case NumaMode::kNodes:
      break;
  }
  for (const int wanted : policy.ddr.nodes) {
    if (std::find(present.begin(), present.end(), wanted) != present.end()) continue;
    return Error{Errc::kInvalidArgument,
                 "ddr.numa: this machine has no NUMA node " + std::to_string(wanted) +
                     "; `numactl --hardware` lists them, and \"nearest\" fits every machine",
                 {},
                 {}};
  }
  return policy.ddr.nodes;
}

}  // namespace terrace
