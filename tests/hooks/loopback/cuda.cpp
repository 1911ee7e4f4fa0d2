// A libcuda.so.1 on host memory, with the error codes of the real one: memory, contexts and what the driver
// says.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "tests/hooks/loopback/machine.hpp"

using namespace terrace::loopback;

namespace {

int device_here() { return current_device < 0 ? 0 : current_device; }

// Large blocks in pages of 2 MiB, as a driver does; small ones in 512 bytes.
std::size_t taken_by(std::size_t bytes) {
  const std::size_t step = bytes >= kGranularity / 2 ? kGranularity : 512;
  return (bytes + step - 1) / step * step;
}

int give(Entry& entry, Pointer* out, std::size_t bytes, Block::Kind kind) {
  if (entry.result() != kSuccess) return entry.result();
  if (out == nullptr || bytes == 0) return kInvalidValue;
  const int device = kind == Block::Kind::kHost ? -1 : device_here();
  if (device >= 0) {
    const std::size_t taken = taken_by(bytes);
    if (taken > kCapacity - entry->used[device]) return kOutOfMemory;
    entry->used[device] += taken;
  }
  const Pointer address = entry->next_address;
  entry->next_address += std::max<std::size_t>(taken_by(bytes), 512);
  entry->blocks[address] = {device, bytes, kind};
  *out = address;
  return kSuccess;
}

int take(Entry& entry, Pointer address) {
  if (entry.result() != kSuccess) return entry.result();
  if (address == 0) return kSuccess;
  const auto block = entry->blocks.find(address);
  if (block == entry->blocks.end()) return kInvalidValue;
  await_all_work(entry);
  const auto still = entry->blocks.find(address);
  if (still == entry->blocks.end()) return kInvalidValue;
  if (still->second.device >= 0) entry->used[still->second.device] -= taken_by(still->second.bytes);
  entry->blocks.erase(still);
  return kSuccess;
}

struct Array {
  std::size_t width, height;
  int format;
  unsigned channels;
};
struct Array3d {
  std::size_t width, height, depth;
  int format;
  unsigned channels, flags;
};

}  // namespace

extern "C" {
#define API __attribute__((visibility("default"))) int
API cuInit(unsigned) { return kSuccess; }
API cuDriverGetVersion(int* version) { return *version = 13000, kSuccess; }
API cuDeviceGetCount(int* count) { return *count = kDevices, kSuccess; }
API cuCtxGetCurrent(void** context) {
  *context = current_device < 0 ? nullptr : &machine().legacy[current_device];
  return kSuccess;
}
API cuCtxSetCurrent(void* context) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  current_device = -1;
  for (int i = 0; i < kDevices; ++i) {
    if (context == &machine().legacy[i]) current_device = i;
  }
  return kSuccess;
}
API cuCtxGetDevice(int* device) {
  if (current_device < 0) return kInvalidContext;
  return *device = current_device, kSuccess;
}
API cuCtxSynchronize() {
  Entry entry;
  if (entry.result() == kSuccess) await_all_work(entry);
  return entry.result();
}
// The memory of `peer` is open to this thread's device; plain memory always is.
API cuCtxEnablePeerAccess(void*, unsigned) {
  const Entry entry;
  return entry.result();
}
API cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = &machine().legacy[device], kSuccess;
}
API cuDevicePrimaryCtxReset_v2(int device) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  std::erase_if(entry->blocks, [&](const auto& each) {
    if (each.second.device != device) return false;
    entry->used[device] -= taken_by(each.second.bytes);
    return true;
  });
  return kSuccess;
}
API cuDeviceTotalMem_v2(std::size_t* total, int) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  return *total = kCapacity, kSuccess;
}
API cuDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:1B:0%d.0", device);
  return kSuccess;
}
API cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  if (current_device < 0) return kInvalidContext;
  *available = kCapacity - entry->used[current_device];
  *total = kCapacity;
  return kSuccess;
}

API cuMemAlloc_v2(Pointer* out, std::size_t bytes) {
  Entry entry;
  if (entry->captures > 0 && capture_mode != 2) return kCaptureUnsupported;
  return give(entry, out, bytes, Block::Kind::kPlain);
}
API cuMemAllocManaged(Pointer* out, std::size_t bytes, unsigned) {
  Entry entry;
  return give(entry, out, bytes, Block::Kind::kPlain);
}
API cuMemAllocPitch_v2(Pointer* out, std::size_t* pitch, std::size_t width, std::size_t height, unsigned) {
  Entry entry;
  if (pitch == nullptr) return kInvalidValue;
  *pitch = (width + 511) / 512 * 512;
  return give(entry, out, *pitch * height, Block::Kind::kPlain);
}
API cuMemHostAlloc(void** out, std::size_t bytes, unsigned) {
  Entry entry;
  if (out == nullptr) return kInvalidValue;
  if (bytes > (std::size_t{1} << 30)) return kOutOfMemory;
  Pointer address = 0;
  const int result = give(entry, &address, bytes, Block::Kind::kHost);
  if (result == kSuccess) *out = reinterpret_cast<void*>(address);
  return result == kInvalidValue ? kOutOfMemory : result;
}
API cuMemAllocHost_v2(void** out, std::size_t bytes) { return cuMemHostAlloc(out, bytes, 0); }
API cuMemFree_v2(Pointer address) {
  Entry entry;
  return take(entry, address);
}
API cuMemFreeHost(void* address) {
  Entry entry;
  return take(entry, reinterpret_cast<std::uintptr_t>(address));
}
API cuArrayCreate_v2(void** out, const Array* what) {
  Entry entry;
  Pointer at = 0;
  const int result =
      give(entry, &at, what->width * std::max<std::size_t>(what->height, 1) * what->channels * 4,
           Block::Kind::kArray);
  if (result == kSuccess) *out = reinterpret_cast<void*>(at);
  return result;
}
API cuArray3DCreate_v2(void** out, const Array3d* what) {
  const Array flat{what->width,
                   std::max<std::size_t>(what->height, 1) * std::max<std::size_t>(what->depth, 1),
                   what->format, what->channels};
  return cuArrayCreate_v2(out, &flat);
}
API cuMipmappedArrayCreate(void** out, const Array3d* what, unsigned) {
  return cuArray3DCreate_v2(out, what);
}
API cuArrayDestroy(void* array) { return cuMemFreeHost(array); }
API cuMipmappedArrayDestroy(void* array) { return cuMemFreeHost(array); }

// The variant of another version: same name when asked for, never to be replaced.
API cuMemAlloc(unsigned* out, unsigned bytes) {
  *out = bytes;
  return kSuccess;
}

// Allocates behind everybody's back, as a runtime that has its own way into the driver.
API loopback_hidden_alloc(void** out, std::size_t bytes) {
  Entry entry;
  Pointer address = 0;
  const int result = give(entry, &address, bytes, Block::Kind::kPlain);
  if (result == kSuccess) *out = reinterpret_cast<void*>(address);
  return result;
}
API loopback_hidden_free(void* address) { return cuMemFreeHost(address); }
// What a test asks.
__attribute__((visibility("default"))) std::size_t loopback_used(int device) {
  const std::lock_guard lock(machine().mutex);
  return machine().used[device];
}
__attribute__((visibility("default"))) long loopback_calls() { return machine().calls; }
#undef API
}
