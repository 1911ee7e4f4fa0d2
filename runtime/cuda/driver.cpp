#include "runtime/cuda/driver.hpp"

#include <dlfcn.h>

#include <string>

namespace terrace::cuda {

namespace {

// cuda.h's macros are expanded before the name becomes a string.
#define TERRACE_STRING_OF(text) #text
#define TERRACE_SYMBOL_OF(name) TERRACE_STRING_OF(name)

struct OpenedDriver {
  Driver table;
  std::string problem;  // empty: usable
};

template <typename Function>
bool resolve(void* library, Function& entry, const char* symbol, const char* older, std::string& problem) {
  void* found = dlsym(library, symbol);
  if (found == nullptr && older != nullptr) found = dlsym(library, older);
  if (found == nullptr) problem = std::string("libcuda.so.1 has no ") + symbol + ": the driver is too old";
  entry = reinterpret_cast<Function>(found);
  return found != nullptr;
}

std::string explain(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) {
    return "driver error " + std::to_string(static_cast<int>(result));
  }
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) return name;
  return std::string(name) + ": " + text;
}

OpenedDriver open_once() {
  OpenedDriver opened;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    opened.problem = std::string("no CUDA driver on this machine: ") + (reason != nullptr ? reason : "");
    return opened;
  }
  Driver& table = opened.table;
#define DRIVER_SYMBOL(name) \
  if (!resolve(library, table.name, TERRACE_SYMBOL_OF(name), nullptr, opened.problem)) return opened;
#define DRIVER_SYMBOL_SINCE(name, older) \
  if (!resolve(library, table.name, TERRACE_SYMBOL_OF(name), older, opened.problem)) return opened;
#define DRIVER_SYMBOL_OPTIONAL(name) \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(library, TERRACE_SYMBOL_OF(name)));
#include "runtime/cuda/driver_symbols.def"
#undef DRIVER_SYMBOL
#undef DRIVER_SYMBOL_SINCE
#undef DRIVER_SYMBOL_OPTIONAL
  if (const CUresult started = table.cuInit(0); started != CUDA_SUCCESS) {
    opened.problem = "cuInit: " + explain(table, started);
    return opened;
  }
  int devices = 0;
  if (const CUresult counted = table.cuDeviceGetCount(&devices); counted != CUDA_SUCCESS) {
    opened.problem = "cuDeviceGetCount: " + explain(table, counted);
  } else if (devices == 0) {
    opened.problem = "the CUDA driver finds no device";
  }
  return opened;
}

#undef TERRACE_SYMBOL_OF
#undef TERRACE_STRING_OF

Errc code_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
      return Errc::kOutOfMemory;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_NOT_FOUND:
      return Errc::kNotFound;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
    // Refused because some stream is being captured; the context lives on.
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
    case CUDA_ERROR_CAPTURED_EVENT:
      return Errc::kNotSupported;
    case CUDA_ERROR_NOT_READY:
    case CUDA_ERROR_TIMEOUT:
      return Errc::kTimeout;
    // The caller's arguments; the context lives on.
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_MAP_FAILED:
    case CUDA_ERROR_UNMAP_FAILED:
    case CUDA_ERROR_ALREADY_MAPPED:
    case CUDA_ERROR_NOT_MAPPED:
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
    case CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED:
      return Errc::kInvalidArgument;
    case CUDA_ERROR_OPERATING_SYSTEM:
      return Errc::kIo;
    default:
      // Illegal addresses, failed launches, ECC: the driver refuses every later call on the context.
      return Errc::kDeviceLost;
  }
}

}  // namespace

Result<const Driver*> open_driver() {
  // Never destroyed: devices may be closed by static destructors.
  static const OpenedDriver& opened = *new OpenedDriver(open_once());
  if (!opened.problem.empty()) return Error{.code = Errc::kNotSupported, .text = opened.problem};
  return &opened.table;
}

Status check(const Driver& driver, CUresult result, const CallSite& site) {
  if (result == CUDA_SUCCESS) return {};
  std::string text = site.call;
  if (site.size > 0_B) text += "(" + format_bytes(site.size) + ")";
  text += " on cuda device " + std::to_string(site.device.index) + ": " + explain(driver, result);
  return Error{.code = code_of(result), .text = std::move(text), .bytes = site.size};
}

}  // namespace terrace::cuda
