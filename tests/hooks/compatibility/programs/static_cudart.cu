// A program with the CUDA runtime linked in: nothing of its calls can be intercepted but what reaches the
// driver.
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

__global__ void mix(unsigned* values, unsigned count, unsigned turn) {
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < count) values[index] = values[index] * 1664525U + 1013904223U + turn + index;
}

static bool failed(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return false;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  return true;
}

int main() {
  constexpr unsigned kCount = 16U << 20, kBlocks = 8;
  std::vector<unsigned*> blocks(kBlocks);
  for (unsigned*& block : blocks) {
    if (failed("cudaMalloc", cudaMalloc(&block, kCount * sizeof(unsigned)))) return 1;
    if (failed("cudaMemset", cudaMemset(block, 1, kCount * sizeof(unsigned)))) return 1;
  }
  cudaStream_t stream;
  if (failed("cudaStreamCreate", cudaStreamCreate(&stream))) return 1;
  unsigned* passing = nullptr;
  if (failed("cudaMallocAsync",
             cudaMallocAsync(reinterpret_cast<void**>(&passing), kCount * sizeof(unsigned), stream)))
    return 1;
  if (failed("cudaFreeAsync", cudaFreeAsync(passing, stream))) return 1;
  for (unsigned turn = 0; turn < 32; ++turn)
    mix<<<kCount / 256, 256, 0, stream>>>(blocks[turn % kBlocks], kCount, turn);
  if (failed("the kernels", cudaStreamSynchronize(stream))) return 1;
  std::vector<unsigned> host(kCount);
  for (unsigned* block : blocks) {
    if (failed("cudaMemcpy",
               cudaMemcpy(host.data(), block, kCount * sizeof(unsigned), cudaMemcpyDeviceToHost)))
      return 1;
    unsigned sum = 0;
    for (const unsigned value : host) sum = sum * 31 + value;
    std::printf("%u\n", sum);
    if (failed("cudaFree", cudaFree(block))) return 1;
  }
  std::puts("done");
  return 0;
}
