// The loopback driver's physical memory, and sharing between processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/hooks/loopback/machine.hpp"

using namespace terrace::loopback;

namespace {

struct Properties {
  int type, handle_types, location, id;
};
struct Access {
  int location, id, flags;
};
struct IpcHandle {
  char opaque[64];
};

// The mapping around an address; the end: there is none.
std::map<Pointer, Pointer>::iterator mapping_around(Entry& entry, Pointer address) {
  auto it = entry->mappings.upper_bound(address);
  if (it == entry->mappings.begin()) return entry->mappings.end();
  --it;
  return address - it->first < entry->handles[it->second].bytes ? it : entry->mappings.end();
}

void end_if_unheld(Entry& entry, Pointer handle) {
  const auto found = entry->handles.find(handle);
  if (found == entry->handles.end() || found->second.references > 0 || found->second.mappings > 0) return;
  if (found->second.device >= 0 && !found->second.imported)
    entry->used[found->second.device] -= found->second.bytes;
  close(found->second.file);
  entry->handles.erase(found);
}

int unmap(Pointer at, std::size_t bytes) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  auto it = entry->mappings.lower_bound(at);
  if (it == entry->mappings.end() || it->first != at) return kInvalidValue;
  while (it != entry->mappings.end() && it->first < at + bytes) {
    const Pointer handle = it->second;
    mmap(reinterpret_cast<void*>(it->first), entry->handles[handle].bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    --entry->handles[handle].mappings;
    entry->access.erase(it->first);
    it = entry->mappings.erase(it);
    end_if_unheld(entry, handle);
  }
  return kSuccess;
}

}  // namespace

extern "C" {
#define API __attribute__((visibility("default"))) int
API cuMemGetAllocationGranularity(std::size_t* granularity, const Properties*, int) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  return *granularity = kGranularity, kSuccess;
}
API cuMemAddressReserve(Pointer* out, std::size_t bytes, std::size_t, Pointer, unsigned long long) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return kOutOfMemory;
  *out = reinterpret_cast<std::uintptr_t>(at);
  entry->ranges[*out] = bytes;
  return kSuccess;
}
API cuMemAddressFree(Pointer at, std::size_t bytes) {
  const Entry entry;
  if (entry->ranges.erase(at) == 0) return kInvalidValue;
  munmap(reinterpret_cast<void*>(at), bytes);
  return kSuccess;
}
API cuMemCreate(Pointer* out, std::size_t bytes, const Properties* properties, unsigned long long) {
  const Entry entry;
  if (entry->captures > 0 && capture_mode != 2) return kCaptureUnsupported;
  if (entry.result() != kSuccess) return entry.result();
  if (properties == nullptr || out == nullptr || bytes == 0) return kInvalidValue;
  if (bytes == entry->refuse) return kOutOfMemory;
  Physical made;
  made.bytes = bytes;
  if (properties->location == 1) {
    made.device = properties->id;
    if (bytes > kCapacity - entry->used[made.device]) return kOutOfMemory;
    entry->used[made.device] += bytes;
  }
  made.file = memfd_create("loopback", MFD_CLOEXEC);
  if (made.file < 0 || ftruncate(made.file, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  *out = ++entry->next_handle;
  entry->handles[*out] = made;
  return kSuccess;
}
API cuMemGetAllocationPropertiesFromHandle(Properties* out, Pointer handle) {
  const Entry entry;
  const auto found = entry->handles.find(handle);
  if (found == entry->handles.end()) return kInvalidValue;
  const int device = found->second.device;
  return *out = {1, 0, device < 0 ? 3 : 1, std::max(device, 0)}, kSuccess;
}
API cuMemRelease(Pointer handle) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  const auto found = entry->handles.find(handle);
  if (found == entry->handles.end() || found->second.references == 0) return kInvalidValue;
  --found->second.references;
  end_if_unheld(entry, handle);
  return kSuccess;
}
API cuMemMap(Pointer at, std::size_t bytes, std::size_t, Pointer handle, unsigned long long) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  const auto found = entry->handles.find(handle);
  if (found == entry->handles.end() || entry->mappings.count(at) != 0) return kInvalidValue;
  if (bytes != found->second.bytes) return kInvalidValue;
  // Nobody has access yet.
  mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0);
  ++found->second.mappings;
  entry->mappings[at] = handle;
  return kSuccess;
}
API cuMemUnmap(Pointer at, std::size_t bytes) {
  const int result = unmap(at, bytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(machine().slow));
  return result;
}
API cuMemSetAccess(Pointer at, std::size_t bytes, const Access* who, std::size_t count) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  auto it = entry->mappings.lower_bound(at);
  if (it == entry->mappings.end()) return kInvalidValue;
  for (; it != entry->mappings.end() && it->first < at + bytes; ++it) {
    mprotect(reinterpret_cast<void*>(it->first), entry->handles[it->second].bytes, PROT_READ | PROT_WRITE);
    for (std::size_t i = 0; i < count; ++i) {
      if (who[i].location == 1) entry->access[it->first].push_back(who[i].id);
    }
  }
  return kSuccess;
}
API cuMemRetainAllocationHandle(Pointer* out, void* address) {
  Entry entry;
  const auto it = mapping_around(entry, reinterpret_cast<std::uintptr_t>(address));
  if (it == entry->mappings.end()) return kInvalidValue;
  ++entry->handles[it->second].references;
  return *out = it->second, kSuccess;
}
API cuMemGetAccess(unsigned long long* flags, const int* location, Pointer address) {
  Entry entry;
  const auto it = mapping_around(entry, address);
  if (it == entry->mappings.end()) return kInvalidValue;
  const std::vector<int>& open = entry->access[it->first];
  return *flags = std::count(open.begin(), open.end(), location[1]) > 0 ? 3 : 0, kSuccess;
}
// Of mapped memory the mapping.
API cuMemGetAddressRange_v2(Pointer* base, std::size_t* bytes, Pointer address) {
  Entry entry;
  Pointer first = 0;
  std::size_t size = 0;
  const auto it = mapping_around(entry, address);
  auto block = entry->blocks.upper_bound(address);
  if (it != entry->mappings.end()) {
    first = it->first, size = entry->handles[it->second].bytes;
  } else if (block != entry->blocks.begin()) {
    --block;
    first = block->first, size = block->second.bytes;
  }
  if (address - first >= size) return kNotFound;
  if (base != nullptr) *base = first;
  if (bytes != nullptr) *bytes = size;
  return kSuccess;
}
API cuMulticastBindAddr(Pointer, std::size_t, Pointer address, std::size_t, unsigned long long) {
  Entry entry;
  return mapping_around(entry, address) == entry->mappings.end() ? kInvalidValue : kSuccess;
}
API cuMemExportToShareableHandle(int* file, Pointer handle, int, unsigned long long) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  const auto found = entry->handles.find(handle);
  if (found == entry->handles.end()) return kInvalidValue;
  *file = fcntl(found->second.file, F_DUPFD_CLOEXEC, 0);
  return *file < 0 ? kUnknown : kSuccess;
}
API cuMemImportFromShareableHandle(Pointer* out, void* shared, int) {
  const Entry entry;
  Physical made{0, kGranularity};
  made.imported = true;
  if (shared != nullptr) {
    struct stat state {};
    made.file = fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(shared)), F_DUPFD_CLOEXEC, 0);
    if (made.file < 0 || fstat(made.file, &state) != 0) return kInvalidValue;
    made.bytes = static_cast<std::size_t>(state.st_size);
  }
  *out = ++entry->next_handle;
  entry->handles[*out] = made;
  return kSuccess;
}

API cuIpcGetMemHandle(IpcHandle* out, Pointer address) {
  const Entry entry;
  const auto block = entry->blocks.find(address);
  // Memory that is mapped, or of a pool, has no such handle.
  if (block == entry->blocks.end() || block->second.kind != Block::Kind::kPlain) return kInvalidValue;
  std::memcpy(out->opaque, &address, sizeof address);
  return kSuccess;
}
API cuIpcOpenMemHandle_v2(Pointer* out, IpcHandle handle, unsigned) {
  std::memcpy(out, handle.opaque, sizeof *out);
  *out += std::uint64_t{1} << 44;  // another process's, at an address of its own
  return kSuccess;
}
API cuIpcCloseMemHandle(Pointer) { return kSuccess; }

// From now on there is no physical memory of just this size.
API loopback_refuse(std::size_t bytes) {
  const Entry entry;
  return entry->refuse = bytes, kSuccess;
}
// The devices that may reach the mapping around an address, as bits.
API loopback_access(Pointer address) {
  const Entry entry;
  auto it = entry->mappings.upper_bound(address);
  if (it == entry->mappings.begin()) return 0;
  int bits = 0;
  for (const int device : entry->access[std::prev(it)->first]) bits |= 1 << device;
  return bits;
}
#undef API
}
