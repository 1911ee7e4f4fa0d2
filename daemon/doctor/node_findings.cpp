// Where devices hang on the machine, and who may talk to the daemon.
#include <sys/stat.h>

#include <algorithm>
#include <cctype>

#include "daemon/doctor/examination.hpp"
#include "daemon/observer.hpp"

namespace terrace {
namespace {

// "node0", "node12".
bool is_node(const std::string& name) {
  return name.size() > 4 && name.starts_with("node") &&
         std::all_of(name.begin() + 4, name.end(), [](unsigned char c) { return std::isdigit(c); });
}

}  // namespace

Finding examine_numa(const Case& subject) {
  const Machine& machine = subject.machine;
  Finding finding{.topic = "NUMA", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const auto names = machine.names_in("sys/devices/system/node");
  const auto nodes = std::count_if(names.begin(), names.end(), is_node);
  finding.what = std::to_string(std::max<std::ptrdiff_t>(nodes, 1)) + (nodes > 1 ? " nodes" : " node");
  for (const int wanted : subject.policy.ddr.nodes) {
    if (std::find(names.begin(), names.end(), "node" + std::to_string(wanted)) != names.end()) continue;
    finding.verdict = Verdict::kFail;
    finding.what += "; the policy's ddr.numa names node " + std::to_string(wanted) + ", which is not here";
    finding.fix = "name nodes of this machine, which numactl --hardware lists, or use \"nearest\"";
    return finding;
  }
  if (nodes < 2) return finding;
  for (const std::string& gpu : machine.names_in("proc/driver/nvidia/gpus")) {
    if (machine.line("sys/bus/pci/devices/" + gpu + "/numa_node") != "-1") continue;
    finding.verdict = Verdict::kWarn;
    finding.what += "; the system does not say which one GPU " + gpu + " is on";
    finding.fix =
        "set ddr.numa to the node beside it; in a virtual machine, give the guest the host's topology";
    return finding;
  }
  return finding;
}

Finding examine_socket(const Case& subject) {
  Finding finding{.topic = "socket", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const std::filesystem::path folder = std::filesystem::path(subject.socket).parent_path();
  struct stat facts {};
  if (::stat(folder.c_str(), &facts) != 0) {
    finding.what = subject.socket + ": no daemon, and its folder is made when one starts";
    return finding;
  }
  // Who may write in the folder may put a socket of their own in the daemon's place.
  if ((facts.st_mode & S_IWOTH) != 0 && (facts.st_mode & S_ISVTX) == 0) {
    finding.verdict = Verdict::kFail;
    finding.what = "everybody may write in " + folder.string() + ", and so take the daemon's place";
    finding.fix = "take it from them with: chmod o-w " + folder.string() + ", or set daemon.socket elsewhere";
    return finding;
  }
  const auto observer = Observer::connect(subject.socket);
  if (observer) {
    finding.what = "a daemon answers at " + subject.socket;
    return finding;
  }
  finding.what = observer.error().text;
  if (observer.error().code == Errc::kNotFound) {
    finding.what += "; terrace run starts one";
    return finding;
  }
  finding.verdict = Verdict::kFail;
  finding.fix =
      "let this user use the socket, or name another with daemon.socket; a daemon that hangs says why in its "
      "log";
  return finding;
}

}  // namespace terrace
