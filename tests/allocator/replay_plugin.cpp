// An allocator behind the plugin interface, for tests: it counts, and never holds more than its budget.
#include <cstdio>

#include "allocator/replay/allocator_plugin.h"

namespace {

struct Counting {
  std::size_t budget;
  std::size_t held;
  std::size_t blocks;
  char place[64];
};

void* open_counting(int device, std::size_t budget, char* error, std::size_t error_size) {
  if (device >= 0) {
    std::snprintf(error, error_size, "there is no device %d here", device);
    return nullptr;
  }
  return new Counting{budget, 0, 0, {}};
}
void close_counting(void* self) {
  auto* counting = static_cast<Counting*>(self);
  if (counting->blocks != 0) std::fprintf(stderr, "blocks were left over\n");
  delete counting;
}
void* new_stream(void* self) { return self; }
void* allocate(void* self, std::size_t bytes, void* stream) {
  auto* counting = static_cast<Counting*>(self);
  if (stream != self || bytes > counting->budget - counting->held) return nullptr;
  counting->held += bytes;
  return counting->place + ++counting->blocks % sizeof counting->place;
}
void release(void* self, void*, std::size_t bytes, void* stream) {
  auto* counting = static_cast<Counting*>(self);
  if (stream != self) std::fprintf(stderr, "a stream of nobody\n");
  counting->held -= bytes;
  --counting->blocks;
}
std::size_t reserved(void* self) { return 2 * static_cast<Counting*>(self)->held; }

#ifndef TEST_PLUGIN_ABI
#define TEST_PLUGIN_ABI TERRACE_ALLOCATOR_PLUGIN_ABI
#endif
constexpr struct terrace_allocator_plugin kPlugin = {
    TEST_PLUGIN_ABI, "counting", open_counting, close_counting, new_stream, allocate, release, reserved};

}  // namespace

extern "C" __attribute__((visibility("default"))) const struct terrace_allocator_plugin*
terrace_allocator_plugin(void) {
  return &kPlugin;
}
