// The two functions of torch.cuda.memory.CUDAPluggableAllocator, by which torch.cuda.MemPool, or all of
// PyTorch, allocates from the pool of this process whatever the allocator mode.
#include <sys/types.h>

#include "hooks/intercept/cuda/stream_pools.hpp"

extern "C" {
using namespace terrace;
using namespace terrace::hooks;
using namespace terrace::hooks::cuda;

CallResult cuMemAllocAsync(DevicePointer* out, std::size_t bytes, StreamHandle stream);  // intercepted
CallResult cuMemFreeAsync(DevicePointer address, StreamHandle stream);

// Null where there is no memory. PyTorch has made `device` the thread's.
__attribute__((visibility("default"))) void* terrace_torch_alloc(ssize_t size, int /*device*/,
                                                                 StreamHandle stream) {
  if (size <= 0) return nullptr;
  const StreamName name{stream, DefaultStream::kLegacy};
  DevicePointer out = 0;
  if (stream_pools().allocate_always(name, Bytes(static_cast<std::uint64_t>(size)), &out))
    return reinterpret_cast<void*>(out);
  // What the pool cannot serve now comes from the driver, charged as any other allocation.
  return cuMemAllocAsync(&out, static_cast<std::size_t>(size), stream) == kSuccess
             ? reinterpret_cast<void*>(out)
             : nullptr;
}

__attribute__((visibility("default"))) void terrace_torch_free(void* address, ssize_t /*size*/,
                                                               int /*device*/, StreamHandle stream) {
  if (address != nullptr) (void)cuMemFreeAsync(reinterpret_cast<std::uintptr_t>(address), stream);
}
}
