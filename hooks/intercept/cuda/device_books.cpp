#include "hooks/intercept/cuda/device_books.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>

#include "hooks/intercept/loader_functions.hpp"

namespace terrace::hooks::cuda {
namespace {

// Of NVML's stable interface, as far as it is used here.
using NvmlDevice = void*;
struct NvmlProcess {
  unsigned number = 0;
  unsigned long long bytes = 0;  // all ones: not told
  unsigned gpu_instance = 0, compute_instance = 0;
};
static_assert(sizeof(NvmlProcess) == 24);
constexpr std::size_t kMostProcesses = 256;

struct Nvml {
  int (*init)() = nullptr;
  int (*device)(const char* pci, NvmlDevice* device) = nullptr;
  int (*processes)(NvmlDevice device, unsigned* count, NvmlProcess* processes) = nullptr;
  [[nodiscard]] bool usable() const { return init != nullptr && device != nullptr && processes != nullptr; }
};

constinit Nvml the_library;  // open as long as the process, once it is
constinit std::atomic<bool> is_open{false};

Nvml open_nvml() noexcept {
  Nvml nvml;
  void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    (void)::dlerror();  // our failed looks are not the guest's
    return nvml;
  }
  const auto find = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
        loader_functions().dlsym(library, name));
    if (function == nullptr) (void)::dlerror();
  };
  find(nvml.init, "nvmlInit_v2");
  find(nvml.device, "nvmlDeviceGetHandleByPciBusId_v2");
  find(nvml.processes, "nvmlDeviceGetComputeRunningProcesses_v3");
  if (nvml.usable() && nvml.init() != 0) nvml.init = nullptr;
  return nvml;
}

}  // namespace

void open_books() noexcept {
  the_library = open_nvml();
  is_open.store(true, std::memory_order_release);
}

std::optional<Bytes> held_by_this_process(const DeviceFacts& facts) noexcept try {
  if (!is_open.load(std::memory_order_acquire)) return std::nullopt;
  const Nvml& nvml = the_library;
  NvmlDevice device = nullptr;
  if (!nvml.usable() || nvml.device(facts.name.c_str(), &device) != 0) return std::nullopt;
  std::array<NvmlProcess, kMostProcesses> processes;
  unsigned count = kMostProcesses;
  if (nvml.processes(device, &count, processes.data()) != 0) return std::nullopt;
  const auto own = static_cast<unsigned>(::getpid());
  for (unsigned i = 0; i < count && i < kMostProcesses; ++i) {
    if (processes[i].number == own && processes[i].bytes != ~0ULL) return Bytes(processes[i].bytes);
  }
  return std::nullopt;
} catch (...) {
  return std::nullopt;
}

}  // namespace terrace::hooks::cuda
