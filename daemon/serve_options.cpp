#include "daemon/serve_options.hpp"

#include <algorithm>
#include <cctype>
#include <chrono>

#include "daemon/socket_path.hpp"
#include "runtime/memory_limits.hpp"
#include "runtime/topology.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {
namespace {

Result<Policy> policy_of(const ServeCommandLine& line) {
  return line.policy.empty() ? Result<Policy>(Policy{}) : load_policy(line.policy);
}

// "24GiB", or a plain count of bytes.
Result<Bytes> bytes_from(const std::string& text, const char* option) {
  const bool digits = !text.empty() && text.size() < 19 &&
                      std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
  if (digits) return Bytes(std::stoull(text));
  auto bytes = parse_bytes(text);
  if (!bytes) return Error{bytes.error().code, std::string(option) + ": " + bytes.error().text};
  return bytes;
}

Result<ClientRegistry::Limits> limits_of(const Policy& policy, const ServeCommandLine& line) {
  ClientRegistry::Limits limits;
  limits.hbm_budget = policy.hbm.budget;
  if (policy.hbm.budget.form == Amount::Form::kBytes) limits.hbm_per_device = policy.hbm.budget.bytes;
  if (!line.hbm.empty()) {
    const auto bytes = bytes_from(line.hbm, "--hbm");
    if (!bytes) return bytes.error();
    limits.hbm_per_device = *bytes;
  }
  const auto host = memory_limits();
  // Unknown: no DDR to lease but what is named in bytes.
  const Bytes usable = host ? host->usable : Bytes();
  Bytes ddr = policy.ddr.budget.resolve(usable, usable / 2);
  if (!line.ddr.empty()) {
    const auto bytes = bytes_from(line.ddr, "--ddr");
    if (!bytes) return bytes.error();
    ddr = *bytes;
  }
  limits.node_budgets[static_cast<std::size_t>(TierId::kDdr)] = ddr;
  limits.jobs = policy.daemon.jobs;
  return limits;
}

Result<AccessRules> access_of(const Policy& policy) {
  AccessRules rules;
  if (!policy.daemon.group.empty()) {
    const auto group = group_named(policy.daemon.group, "daemon.group");
    if (!group) return group.error();
    rules.group = *group;
  }
  rules.everybody_reads = policy.daemon.readers == "*";
  if (!policy.daemon.readers.empty() && !rules.everybody_reads) {
    const auto readers = group_named(policy.daemon.readers, "daemon.readers");
    if (!readers) return readers.error();
    rules.readers = *readers;
  }
  return rules;
}

Result<Server::Live> live_of(const Policy& policy, const ServeCommandLine& line) {
  auto limits = limits_of(policy, line);
  if (!limits) return limits.error();
  auto access = access_of(policy);
  if (!access) return access.error();
  return Server::Live{*std::move(limits), *std::move(access)};
}

// Memory by NUMA node, where there is more than one.
std::map<int, Bytes> numa_memory() {
  std::map<int, Bytes> memory;
  const auto topology = Topology::of_this_machine();
  if (!topology || topology->nodes().size() < 2) return memory;
  for (const NumaNode& node : topology->nodes()) memory.emplace(node.index, node.memory);
  return memory;
}

}  // namespace

Result<Server::Options> serve_options(const ServeCommandLine& line) {
  const auto policy = policy_of(line);
  if (!policy) return policy.error();
  const auto live = live_of(*policy, line);
  if (!live) return live.error();
  const auto socket =
      line.socket.empty() ? choose_socket(policy->daemon.socket) : Result<std::string>(line.socket);
  if (!socket) return socket.error();
  Server::Options options;
  options.socket = *socket;
  options.listen = line.listen.empty() ? policy->metrics.listen : line.listen;
  options.tls_cert = policy->metrics.tls_cert;
  options.tls_key = policy->metrics.tls_key;
  options.auth_file = policy->metrics.auth_file;
  static_cast<ClientRegistry::Limits&>(options.registry) = live->limits;
  options.registry.numa = numa_memory();
  options.registry.driver_memory = nvml_memory();
  options.access = live->access;
  if (line.exit_when_idle >= 0)
    options.exit_when_idle = std::chrono::milliseconds(static_cast<std::int64_t>(line.exit_when_idle * 1000));
  if (line.policy.empty()) return options;
  options.reread = [line]() -> Result<Server::Live> {
    const auto policy = policy_of(line);
    if (!policy) return policy.error();
    return live_of(*policy, line);
  };
  return options;
}

}  // namespace terrace
