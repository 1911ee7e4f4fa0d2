// A CUDA runtime over the driver that it finds as the real one does: dlopen, dlsym, cuGetProcAddress. Built
// as libcudart.so.13 and libcudart.so.12, whose symbols have the versions of the real libraries', and linked
// into a guest, where nothing of it passes the preload library.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#ifndef LOOPBACK_CUDA_VERSION
#define LOOPBACK_CUDA_VERSION 13000
#endif
#ifdef LOOPBACK_STATIC
#define API __attribute__((visibility("hidden"))) int
#else
#define API __attribute__((visibility("default"))) int
#endif

namespace {

using Pointer = unsigned long long;
using GetProcAddress = int (*)(const char*, void**, int, unsigned long long, int*);

GetProcAddress proc_address() {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<GetProcAddress>(dlsym(library, "cuGetProcAddress_v2"));
}

void* driver_function(const char* name, unsigned long long flags) {
  static const GetProcAddress ask = proc_address();
  void* found = nullptr;
  int status = 0;
  if (ask == nullptr || ask(name, &found, LOOPBACK_CUDA_VERSION, flags, &status) != 0) return nullptr;
  return found;
}
template <typename... Arguments>
int driver(const char* name, unsigned long long flags, Arguments... arguments) {
  void* function = driver_function(name, flags);
  return function == nullptr ? 500 : reinterpret_cast<int (*)(Arguments...)>(function)(arguments...);
}

thread_local int last_error = 0;
thread_local int device_set = 0;
int keep(int result) {
  if (result != 0) last_error = result;
  return result;
}

// The first call of a thread makes its context current.
void begin() {
  void* context = nullptr;
  driver("cuDevicePrimaryCtxRetain", 0, &context, device_set);
  driver("cuCtxSetCurrent", 0, context);
}

// With LOOPBACK_HIDDEN it allocates by a way of its own into the driver, which nobody sees.
bool hidden() {
  static const bool is = std::getenv("LOOPBACK_HIDDEN") != nullptr;
  return is;
}
void* hidden_function(const char* name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), name); }

int allocate(void** out, std::size_t bytes) {
  begin();
  if (out == nullptr) return keep(1);
  if (hidden())
    return keep(
        reinterpret_cast<int (*)(void**, std::size_t)>(hidden_function("loopback_hidden_alloc"))(out, bytes));
  Pointer address = 0;
  const int result = keep(driver("cuMemAlloc", 0, &address, bytes));
  if (result == 0) *out = reinterpret_cast<void*>(address);
  return result;
}
int allocate_async(void** out, std::size_t bytes, void* stream, unsigned long long flags) {
  begin();
  Pointer address = 0;
  const int result = keep(driver("cuMemAllocAsync", flags, &address, bytes, stream));
  if (result == 0) *out = reinterpret_cast<void*>(address);
  return result;
}
Pointer number(void* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

extern "C" {
API cudaGetLastError() {
  const int was = last_error;
  last_error = 0;
  return was;
}
API cudaSetDevice(int device) {
  device_set = device;
  begin();
  return 0;
}
API cudaMalloc(void** out, std::size_t bytes) { return allocate(out, bytes); }
API cudaMallocAsync(void** out, std::size_t bytes, void* stream) {
  return allocate_async(out, bytes, stream, 0);
}
API cudaMallocAsync_ptsz(void** out, std::size_t bytes, void* stream) {
  return allocate_async(out, bytes, stream, 2);
}
API cudaMallocFromPoolAsync(void** out, std::size_t bytes, void* pool, void* stream) {
  begin();
  Pointer address = 0;
  const int result = keep(driver("cuMemAllocFromPoolAsync", 0, &address, bytes, pool, stream));
  if (result == 0) *out = reinterpret_cast<void*>(address);
  return result;
}
API cudaMallocManaged(void** out, std::size_t bytes, unsigned flags) {
  begin();
  Pointer address = 0;
  const int result = keep(driver("cuMemAllocManaged", 0, &address, bytes, flags));
  if (result == 0) *out = reinterpret_cast<void*>(address);
  return result;
}
API cudaMallocPitch(void** out, std::size_t* pitch, std::size_t width, std::size_t height) {
  begin();
  Pointer address = 0;
  const int result = keep(driver("cuMemAllocPitch", 0, &address, pitch, width, height, 4U));
  if (result == 0) *out = reinterpret_cast<void*>(address);
  return result;
}
API cudaHostAlloc(void** out, std::size_t bytes, unsigned flags) {
  return begin(), keep(driver("cuMemHostAlloc", 0, out, bytes, flags));
}
API cudaMallocHost(void** out, std::size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
API cudaFree(void* address) {
  begin();
  if (hidden())
    return keep(reinterpret_cast<int (*)(void*)>(hidden_function("loopback_hidden_free"))(address));
  return keep(driver("cuMemFree", 0, number(address)));
}
API cudaFreeAsync(void* address, void* stream) {
  return begin(), keep(driver("cuMemFreeAsync", 0, number(address), stream));
}
API cudaFreeAsync_ptsz(void* address, void* stream) {
  return begin(), keep(driver("cuMemFreeAsync", 2, number(address), stream));
}
API cudaFreeHost(void* address) { return keep(driver("cuMemFreeHost", 0, address)); }
API cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  return begin(), keep(driver("cuMemGetInfo", 0, available, total));
}
struct Extent {
  unsigned x, y, z;
};
API cudaLaunchKernel(const void* function, Extent grid, Extent block, void** parameters, std::size_t shared,
                     void* stream) {
  void* extra = nullptr;
  // With LOOPBACK_HIDDEN_LAUNCH it launches by a way of its own.
  static const bool hides = std::getenv("LOOPBACK_HIDDEN_LAUNCH") != nullptr;
  if (hides) {
    using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                           void**, void**);
    return keep(reinterpret_cast<Launch>(hidden_function("loopback_hidden_launch"))(
        const_cast<void*>(function), grid.x, grid.y, grid.z, block.x, block.y, block.z,
        static_cast<unsigned>(shared), stream, parameters, nullptr));
  }
#ifdef LOOPBACK_STATIC
  // It launches by the handles of its library.
  using KernelOf = int (*)(void**, void*);
  void* kernel = nullptr;
  reinterpret_cast<KernelOf>(hidden_function("loopback_kernel_of_library"))(&kernel,
                                                                            const_cast<void*>(function));
  function = kernel;
#endif
  return begin(), keep(driver("cuLaunchKernel", 0, const_cast<void*>(function), grid.x, grid.y, grid.z,
                              block.x, block.y, block.z, static_cast<unsigned>(shared), stream, parameters,
                              static_cast<void**>(extra)));
}
API cudaGetDriverEntryPointByVersion(const char* symbol, void** out, unsigned version,
                                     unsigned long long flags, int* status) {
  return keep(proc_address()(symbol, out, static_cast<int>(version), flags, status));
}
API cudaGetDriverEntryPoint(const char* symbol, void** out, unsigned long long flags, int* status) {
  return cudaGetDriverEntryPointByVersion(symbol, out, LOOPBACK_CUDA_VERSION, flags, status);
}
API loopback_runtime_version() { return LOOPBACK_CUDA_VERSION; }
#undef API
}
