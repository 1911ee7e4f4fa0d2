// cuGetProcAddress of the loopback driver: the newest variant up to the version asked for, by the kind of
// default stream. LOOPBACK_DRIVER=12 is a driver of CUDA 12, which lacks what came later.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/hooks/loopback/machine.hpp"

using namespace terrace::loopback;

extern "C" {
// Addresses are all that is needed of them here.
#define KNOWN(name) int name();
#include "tests/hooks/loopback/proc_address.def"
#undef KNOWN
int cuMemAlloc();
int cuGetProcAddress(const char*, void**, int, unsigned long long);
int cuGetProcAddress_v2(const char*, void**, int, unsigned long long, int*);

// CUDA 13 gave an old name another signature.
__attribute__((visibility("default"))) int loopback_context_device_v2(int* device, void*) {
  return *device = 13, kSuccess;
}
}

namespace {

constexpr unsigned long long kPerThread = 2;

struct Variant {
  const char* base;
  int since;
  void* function;
  void* per_thread;  // null: the same
};
#define AT(name) reinterpret_cast<void*>(&name)
const Variant kVariants[] = {
    {"cuMemAlloc", 2000, AT(cuMemAlloc), nullptr},
    {"cuMemAlloc", 3020, AT(cuMemAlloc_v2), nullptr},
    {"cuMemFree", 3020, AT(cuMemFree_v2), nullptr},
    {"cuMemAllocPitch", 3020, AT(cuMemAllocPitch_v2), nullptr},
    {"cuMemAllocManaged", 6000, AT(cuMemAllocManaged), nullptr},
    {"cuMemHostAlloc", 2020, AT(cuMemHostAlloc), nullptr},
    {"cuMemFreeHost", 2000, AT(cuMemFreeHost), nullptr},
    {"cuMemGetInfo", 3020, AT(cuMemGetInfo_v2), nullptr},
    {"cuMemCreate", 10020, AT(cuMemCreate), nullptr},
    {"cuMemAllocAsync", 11020, AT(cuMemAllocAsync), AT(cuMemAllocAsync_ptsz)},
    {"cuMemAllocFromPoolAsync", 11020, AT(cuMemAllocFromPoolAsync), AT(cuMemAllocFromPoolAsync_ptsz)},
    {"cuMemFreeAsync", 11020, AT(cuMemFreeAsync), AT(cuMemFreeAsync_ptsz)},
    {"cuLaunchKernel", 4000, AT(cuLaunchKernel), AT(cuLaunchKernel_ptsz)},
    {"cuCtxGetDevice", 2000, AT(cuCtxGetDevice), nullptr},
    {"cuCtxGetDevice", 13000, AT(loopback_context_device_v2), nullptr},
    {"cuCtxSetCurrent", 4000, AT(cuCtxSetCurrent), nullptr},
    {"cuDevicePrimaryCtxRetain", 7000, AT(cuDevicePrimaryCtxRetain), nullptr},
    {"cuGetProcAddress", 11030, AT(cuGetProcAddress), nullptr},
    {"cuGetProcAddress", 12000, AT(cuGetProcAddress_v2), nullptr},
};
#undef AT

}  // namespace

extern "C" {
#define API __attribute__((visibility("default"))) int
API cuGetProcAddress_v2(const char* symbol, void** out, int version, unsigned long long flags, int* found) {
  if (symbol == nullptr || out == nullptr) return kInvalidValue;
  const char* driver = std::getenv("LOOPBACK_DRIVER");
  const int newest = driver != nullptr && std::strcmp(driver, "12") == 0 ? 12080 : 13000;
  *out = nullptr;
  for (const Variant& variant : kVariants) {
    if (std::strcmp(variant.base, symbol) != 0 || variant.since > version || variant.since > newest) continue;
    *out = (flags & kPerThread) != 0 && variant.per_thread != nullptr ? variant.per_thread : variant.function;
  }
  if (found != nullptr) *found = *out == nullptr ? 1 : 0;
  return *out == nullptr ? kNotFound : kSuccess;
}
API cuGetProcAddress(const char* symbol, void** out, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, out, version, flags, nullptr);
}
#undef API
}
