#include "hooks/intercept/cuda/pointer_pages.hpp"

#include "hooks/intercept/cuda/driver_calls.hpp"
#include "hooks/intercept/cuda/launch_view.hpp"
#include "hooks/intercept/cuda/stable_blocks.hpp"

namespace terrace::hooks::cuda {
namespace {

constinit PointerPages the_pages;

constexpr int kMemoryType = 2, kHostMemory = 1;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_HOST

}  // namespace

PointerPages& pointer_pages() noexcept { return the_pages; }

void see_copy_from_host(DevicePointer to, const void* from, std::size_t bytes) noexcept {
  StableBlocks& form = stable_blocks();
  if (!form.any() || from == nullptr || bytes < sizeof(std::uint64_t) || bytes > PointerPages::kMostScanned)
    return;
  bool found = false;
  each_word(from, bytes, [&](std::uint64_t word) { found = found || form.may_hold(word); });
  if (!found) return;
  the_pages.mark(to, bytes);
  // Kernels may find them there without being given the place: in a variable of theirs.
  form.keep_reachable();
}

void see_copy_on_device(DevicePointer to, DevicePointer from, std::size_t bytes) noexcept {
  if (bytes > 0 && the_pages.marked(from)) the_pages.mark(to, bytes);
}

void see_copy(DevicePointer to, DevicePointer from, std::size_t bytes) noexcept {
  if (!stable_blocks().any() || bytes > PointerPages::kMostScanned) return;
  const DriverCalls* driver = driver_calls();
  unsigned type = 0;
  if (driver == nullptr || stable_blocks().may_hold(from)) return see_copy_on_device(to, from, bytes);
  // Memory of the host that no driver knows has no attributes.
  const bool known = driver->pointer_attribute(&type, kMemoryType, from) == kSuccess;
  if (known && type != kHostMemory) return see_copy_on_device(to, from, bytes);
  see_copy_from_host(to, reinterpret_cast<const void*>(from), bytes);
}

}  // namespace terrace::hooks::cuda
