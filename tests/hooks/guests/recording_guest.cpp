// A program that hands out memory of its own over CUDA's, as one of ours does: what it records is nearer to
// the user than what the preload library sees. `recording_guest [later]`: at once, or after its first CUDA
// call.
#include <cstdint>

#include "runtime/trace/recorder.hpp"
#include "tests/hooks/guests/cuda_api.hpp"

int main(int argc, char**) {
  using namespace terrace;
  void* chunk = nullptr;
  int failed = argc > 1 ? cudaMalloc(&chunk, 2 << 20) : 0;
  trace::describe_recording(trace::Layer::kPool, "cuda");
  trace::record_allocate(reinterpret_cast<const void*>(0x1000), 5_KiB, 0, Pool::kGradient);
  for (int i = 0; i < 20000; ++i) {  // more than a buffer of the preload library's recorder
    failed += cudaMalloc(&chunk, 1 << 20);
    failed += cudaFree(chunk);
  }
  trace::record_free(reinterpret_cast<const void*>(0x1000), 0);
  return failed;
}
