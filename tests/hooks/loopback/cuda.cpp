// A libcuda.so.1 on host memory, with the error codes of the real one.
#include <cstdint>
#include <cstring>

#include "tests/hooks/loopback/heap.hpp"

namespace {

using terrace::loopback::heap;
constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500;

int give(void* address, std::uint64_t* out) {
  if (out == nullptr) return kInvalidValue;
  if (address == nullptr) return kOutOfMemory;
  *out = reinterpret_cast<std::uintptr_t>(address);
  return kSuccess;
}
int take(std::uint64_t address) {
  if (address == 0) return kSuccess;
  return heap().free(reinterpret_cast<void*>(address)) ? kSuccess : kInvalidValue;
}

}  // namespace

extern "C" {
using Pointer = unsigned long long;
#define API __attribute__((visibility("default"))) int
API cuMemAlloc_v2(Pointer* out, std::size_t bytes) {
  std::uint64_t address = 0;
  const int result =
      give(out == nullptr ? nullptr : heap().allocate(bytes), out == nullptr ? nullptr : &address);
  if (result == kSuccess) *out = address;
  return result;
}
API cuMemAllocAsync(Pointer* out, std::size_t bytes, void*) { return cuMemAlloc_v2(out, bytes); }
API cuMemAllocFromPoolAsync(Pointer* out, std::size_t bytes, void*, void*) {
  return cuMemAlloc_v2(out, bytes);
}
API cuMemAllocManaged(Pointer* out, std::size_t bytes, unsigned) { return cuMemAlloc_v2(out, bytes); }
API cuMemHostAlloc(void** out, std::size_t bytes, unsigned) {
  if (out == nullptr) return kInvalidValue;
  void* address = heap().allocate(bytes);
  if (address == nullptr) return kOutOfMemory;
  *out = address;
  return kSuccess;
}
API cuMemAllocHost_v2(void** out, std::size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }
API cuMemFree_v2(Pointer address) { return take(address); }
API cuMemFreeAsync(Pointer address, void*) { return take(address); }
API cuMemFreeHost(void* address) { return take(reinterpret_cast<std::uintptr_t>(address)); }
API cuMemCreate(Pointer* handle, std::size_t bytes, const void* properties, unsigned long long) {
  return properties == nullptr ? kInvalidValue : cuMemAlloc_v2(handle, bytes);
}
API cuMemRelease(Pointer handle) { return handle == 0 ? kInvalidValue : take(handle); }
// Allocates behind everybody's back, as code that is linked statically does.
API loopback_hidden_alloc(void** out, std::size_t bytes) {
  *out = heap().allocate(bytes);
  return *out == nullptr ? kOutOfMemory : kSuccess;
}
// The variant of another version: same name when asked for, never to be replaced.
API cuMemAlloc(unsigned* out, unsigned bytes) {
  *out = bytes;
  return kSuccess;
}
API cuGetProcAddress_v2(const char* symbol, void** out, int version, unsigned long long, int* found) {
  if (symbol == nullptr || out == nullptr) return kInvalidValue;
  *out = nullptr;
  if (std::strcmp(symbol, "cuMemAlloc") == 0)
    *out = version >= 3020 ? reinterpret_cast<void*>(&cuMemAlloc_v2) : reinterpret_cast<void*>(&cuMemAlloc);
  if (std::strcmp(symbol, "cuMemFree") == 0) *out = reinterpret_cast<void*>(&cuMemFree_v2);
  if (found != nullptr) *found = *out == nullptr ? 1 : 0;
  return *out == nullptr ? kNotFound : kSuccess;
}
API cuGetProcAddress(const char* symbol, void** out, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, out, version, flags, nullptr);
}
#undef API
}
