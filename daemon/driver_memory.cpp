#include "daemon/driver_memory.hpp"

#include <dlfcn.h>

#include <memory>

namespace terrace {
namespace {

// Of NVML's stable interface, as far as it is used here.
struct NvmlMemory {
  unsigned long long total = 0, free = 0, used = 0;
};
using NvmlDevice = void*;
constexpr int kSuccess = 0;

struct Nvml {
  int (*init)() = nullptr;
  int (*device)(const char* pci, NvmlDevice* device) = nullptr;
  int (*memory)(NvmlDevice device, NvmlMemory* memory) = nullptr;
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

}  // namespace

// The library stays open as long as the process: NVML has threads and state of its own.
DriverMemory nvml_memory() {
  void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {};
  Nvml nvml;
  if (!find(library, "nvmlInit_v2", nvml.init) ||
      !find(library, "nvmlDeviceGetHandleByPciBusId_v2", nvml.device) ||
      !find(library, "nvmlDeviceGetMemoryInfo", nvml.memory) || nvml.init() != kSuccess) {
    ::dlclose(library);
    return {};
  }
  return [nvml](const std::string& pci) -> std::optional<Bytes> {
    NvmlDevice device = nullptr;
    NvmlMemory memory;
    if (nvml.device(pci.c_str(), &device) != kSuccess || nvml.memory(device, &memory) != kSuccess)
      return std::nullopt;
    return Bytes(memory.free);
  };
}

}  // namespace terrace
