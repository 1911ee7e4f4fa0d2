// Somebody else's preload library: it stands before the next cudaMalloc, and says at the end how often it was
// there.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>

namespace {
struct Count {
  int calls = 0;
  ~Count() { std::fprintf(stderr, "other hook %d\n", calls); }
} count;
}  // namespace

extern "C" __attribute__((visibility("default"))) int cudaMalloc(void** out, std::size_t bytes) {
  ++count.calls;
  static const auto next = reinterpret_cast<int (*)(void**, std::size_t)>(dlsym(RTLD_NEXT, "cudaMalloc"));
  return next == nullptr ? 3 : next(out, bytes);
}
