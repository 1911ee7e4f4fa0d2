// What binds pinned host memory: huge pages, the locked memory limit, the control group, overcommit.
#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "allocator/host_room.hpp"
#include "daemon/doctor/examination.hpp"
#include "runtime/memory_limits.hpp"

namespace terrace {
namespace {

// The bytes of DDR that the policy asks for here; none where the limits can't be read.
std::optional<Bytes> ddr_budget(const Case& subject) {
  const auto limits = memory_limits(subject.machine.root());
  if (!limits) return std::nullopt;
  return subject.policy.ddr.budget.resolve(limits->usable, limits->usable / 2);
}

// The number behind a key of proc/meminfo, in bytes.
std::optional<Bytes> of_meminfo(const Machine& machine, std::string_view wanted) {
  std::ifstream file(machine.root() / "proc/meminfo");
  for (std::string key, line; std::getline(file, line);) {
    std::istringstream words(line);
    std::uint64_t kibibytes = 0;
    if (words >> key >> kibibytes && key == wanted) return Bytes(kibibytes * 1024);
  }
  return std::nullopt;
}

// "Max locked memory  65536  65536  bytes": the soft limit. Nothing: unlimited, or not known.
std::optional<Bytes> locked_limit(const Machine& machine) {
  constexpr std::string_view kName = "Max locked memory";
  std::ifstream file(machine.root() / "proc/self/limits");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kName)) continue;
    std::istringstream words(line.substr(kName.size()));
    std::uint64_t bytes = 0;
    if (words >> bytes) return Bytes(bytes);
  }
  return std::nullopt;
}

// CAP_IPC_LOCK, the 14th bit of the effective capabilities.
bool may_lock_everything(const Machine& machine) {
  std::ifstream file(machine.root() / "proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("CapEff:")) continue;
    return ((std::strtoull(line.c_str() + 7, nullptr, 16) >> 14) & 1) != 0;
  }
  return false;
}

}  // namespace

Finding examine_huge_pages(const Case& subject) {
  Finding finding{.topic = "huge pages", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const HugePages wanted = subject.policy.ddr.hugepages;
  if (wanted == HugePages::kOff) {
    finding.what = "the policy wants small pages";
    return finding;
  }
  const auto enabled = subject.machine.line("sys/kernel/mm/transparent_hugepage/enabled");
  const bool transparent = enabled && enabled->find("[never]") == std::string::npos;
  if (wanted == HugePages::kExplicit) {
    const auto free =
        subject.machine.number("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").value_or(0);
    const Bytes set_aside = Bytes(free) * (2_MiB).count();
    const auto budget = ddr_budget(subject);
    finding.what = format_bytes(set_aside) + " of 2 MiB pages are free";
    if (budget && set_aside < *budget) {
      finding.verdict = Verdict::kWarn;
      finding.what += ", the policy's ddr.budget is " + format_bytes(*budget);
      finding.fix = "set more aside with: sysctl vm.nr_hugepages=" +
                    std::to_string((budget->count() + (2_MiB).count() - 1) / (2_MiB).count());
    }
    return finding;
  }
  finding.what = transparent ? "transparent huge pages can be asked for" : "transparent huge pages are off";
  if (!transparent) {
    finding.verdict = Verdict::kWarn;
    finding.what += ": pinning host memory is several times slower";
    finding.fix = "allow them with: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
  }
  return finding;
}

Finding examine_locked_memory(const Case& subject) {
  Finding finding{.topic = "locked memory", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const auto limit = locked_limit(subject.machine);
  const auto budget = ddr_budget(subject);
  if (!limit || may_lock_everything(subject.machine)) {
    finding.what = limit ? "the limit does not bind this user" : "no limit";
    return finding;
  }
  finding.what = "this user may lock " + format_bytes(*limit);
  if (budget && *limit < *budget) {
    finding.verdict = Verdict::kWarn;
    finding.what += ", the policy's ddr.budget is " + format_bytes(*budget);
    finding.fix =
        "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 of a container";
  }
  return finding;
}

Finding examine_control_group(const Case& subject) {
  Finding finding{.topic = "control group", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const auto limits = memory_limits(subject.machine.root());
  if (!limits) {
    finding.verdict = Verdict::kFail;
    finding.what = limits.error().text;
    finding.fix = "mount proc, so that memory can be planned for";
    return finding;
  }
  const Bytes budget = subject.policy.ddr.budget.resolve(limits->usable, limits->usable / 2);
  const Bytes left = limits->group_left.value_or(limits->machine_left);
  finding.what = limits->group_left ? "the group may take " + format_bytes(limits->usable) + ", " +
                                          format_bytes(left) + " of it are left"
                                    : "no limit below the machine's " + format_bytes(limits->machine) + ", " +
                                          format_bytes(left) + " of it are left";
  finding.what += "; ddr.budget is " + format_bytes(budget);
  if (budget > limits->usable) {
    finding.verdict = Verdict::kFail;
    finding.fix = "lower ddr.budget in the policy, or raise memory.max of the group (a container's --memory)";
  } else if (budget > left) {
    finding.verdict = Verdict::kWarn;
    finding.fix = "others use the memory now: lower ddr.budget, or stop them before training starts";
  }
  return finding;
}

Finding examine_overcommit(const Case& subject) {
  Finding finding{.topic = "overcommit", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const auto mode = subject.machine.number("proc/sys/vm/overcommit_memory");
  if (mode != 2) {
    finding.what = mode ? "the kernel does not count reservations strictly" : "not known";
    return finding;
  }
  const auto limit = of_meminfo(subject.machine, "CommitLimit:");
  const auto used = of_meminfo(subject.machine, "Committed_AS:");
  const auto budget = ddr_budget(subject);
  if (!limit || !used || !budget) {
    finding.what = "strict, and how much is left is not known";
    return finding;
  }
  const Bytes left = saturating_sub(*limit, *used);
  finding.what = "strict: " + format_bytes(left) + " can still be reserved";
  if (left < *budget) {
    finding.verdict = Verdict::kFail;
    finding.what += ", ddr.budget is " + format_bytes(*budget);
    finding.fix = "let the kernel decide with: sysctl vm.overcommit_memory=0, or lower ddr.budget";
  }
  return finding;
}

}  // namespace terrace
