// A library linked with the runtime, loaded locally by local_guest: nothing of it is in the global scope.
#include "tests/hooks/guests/cuda_api.hpp"

extern "C" __attribute__((visibility("default"))) int plugin_allocate(std::size_t bytes) {
  void* out = nullptr;
  return cudaMalloc(&out, bytes);
}
