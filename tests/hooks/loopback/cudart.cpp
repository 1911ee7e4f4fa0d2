// A libcudart.so.13 that allocates through the driver by linked calls, so that one call of a guest is two
// intercepted ones. Its symbols have the version of the real library's.
#include <cstddef>
#include <cstdint>

extern "C" {
using Pointer = unsigned long long;
int cuMemAlloc_v2(Pointer* out, std::size_t bytes);
int cuMemFree_v2(Pointer address);
int cuMemHostAlloc(void** out, std::size_t bytes, unsigned flags);
int cuMemFreeHost(void* address);

#define API __attribute__((visibility("default"))) int
API cudaMalloc(void** out, std::size_t bytes) {
  if (out == nullptr) return 1;
  Pointer address = 0;
  const int result = cuMemAlloc_v2(&address, bytes);
  if (result == 0) *out = reinterpret_cast<void*>(address);
  return result;
}
API cudaMallocAsync(void** out, std::size_t bytes, void*) { return cudaMalloc(out, bytes); }
API cudaMallocFromPoolAsync(void** out, std::size_t bytes, void*, void*) { return cudaMalloc(out, bytes); }
API cudaMallocManaged(void** out, std::size_t bytes, unsigned) { return cudaMalloc(out, bytes); }
API cudaMallocPitch(void** out, std::size_t* pitch, std::size_t width, std::size_t height) {
  *pitch = (width + 511) / 512 * 512;
  return cudaMalloc(out, *pitch * height);
}
API cudaMallocHost(void** out, std::size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }
API cudaHostAlloc(void** out, std::size_t bytes, unsigned flags) { return cuMemHostAlloc(out, bytes, flags); }
API cudaFree(void* address) { return cuMemFree_v2(reinterpret_cast<std::uintptr_t>(address)); }
API cudaFreeAsync(void* address, void*) { return cudaFree(address); }
API cudaFreeHost(void* address) { return cuMemFreeHost(address); }
#undef API
}
