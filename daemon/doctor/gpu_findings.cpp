// The driver, and how GPUs reach each other.
#include <algorithm>
#include <string>

#include "daemon/doctor/examination.hpp"

namespace terrace {
namespace {

std::vector<std::string> gpus(const Machine& machine) { return machine.names_in("proc/driver/nvidia/gpus"); }

std::string counted_gpus(std::size_t count) {
  return std::to_string(count) + (count == 1 ? " GPU" : " GPUs");
}

// "... Kernel Module  580.65.06  Release Build": the first word that begins with a digit.
std::string version_in(const std::string& line) {
  for (std::size_t at = 0; at < line.size();) {
    const std::size_t end = std::min(line.find(' ', at), line.size());
    const std::string word = line.substr(at, end - at);
    if (!word.empty() && word[0] >= '0' && word[0] <= '9') return word;
    at = end + 1;
  }
  return "of an unknown version";
}

}  // namespace

Finding examine_driver(const Case& subject) {
  const Machine& machine = subject.machine;
  Finding finding{.topic = "driver", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const auto version = machine.line("proc/driver/nvidia/version");
  if (!version) {
    finding.verdict = Verdict::kWarn;
    finding.what = "no NVIDIA driver is loaded: the emulated device only";
    finding.fix = "install the driver and load it with: modprobe nvidia nvidia_uvm";
    return finding;
  }
  const auto found = gpus(machine);
  finding.what = "NVIDIA driver " + version_in(*version) + ", " + counted_gpus(found.size());
  if (found.empty()) {
    finding.verdict = Verdict::kFail;
    finding.fix = "the driver sees no GPU: look for what it says of it with: dmesg | grep NVRM";
    return finding;
  }
  // The driver's module for memory is loaded apart from the rest, and containers often lack its device.
  for (const char* device : {"dev/nvidiactl", "dev/nvidia-uvm"}) {
    const std::filesystem::path path = machine.root() / device;
    if (!machine.exists(device)) {
      finding.verdict = Verdict::kFail;
      finding.what += "; /" + std::string(device) + " is missing";
      finding.fix = "load the module with: nvidia-modprobe -u -c 0; in a container, pass the device in";
      return finding;
    }
    if (!machine.may_use(path)) {
      finding.verdict = Verdict::kFail;
      finding.what += "; this user may not use /" + std::string(device);
      finding.fix = "let this user read and write it: look at its group with: ls -l /" + std::string(device);
      return finding;
    }
  }
  return finding;
}

Finding examine_peers(const Case& subject) {
  const Machine& machine = subject.machine;
  Finding finding{.topic = "peers", .verdict = Verdict::kOk, .what = {}, .fix = {}};
  const std::size_t count = gpus(machine).size();
  if (count < 2) {
    finding.what = counted_gpus(count) + ": nothing to reach";
    return finding;
  }
  const auto reach = machine.peer_reach();
  if (!reach) {
    finding.verdict = Verdict::kWarn;
    finding.what = "how " + counted_gpus(count) + " reach each other is not known: " + reach.error().text;
    finding.fix = "ask the driver with: nvidia-smi topo -p2p r";
    return finding;
  }
  finding.what = std::to_string(reach->reaching_pairs) + " of " + std::to_string(reach->pairs) +
                 " pairs of " + counted_gpus(static_cast<std::size_t>(reach->devices)) + " reach each other";
  const bool switches =
      machine.exists("dev/nvidia-nvswitch0") || machine.exists("proc/driver/nvidia-nvswitch");
  if (reach->reaching_pairs < reach->pairs) {
    finding.verdict = Verdict::kWarn;
    finding.fix =
        switches ? "start the service that connects NVLink switches: systemctl start nvidia-fabricmanager"
                 : "GPUs under different root ports, or an IOMMU that translates, do not reach each other: "
                   "boot with iommu=pt, or keep a job's GPUs under one switch";
  } else if (switches) {
    finding.what += ", over NVLink switches";
  }
  return finding;
}

}  // namespace terrace
