// Sums, maxima and ranks over a warp or a block, always in the same order: the same numbers in, the same bits
// out.
#pragma once

#include <cstdint>

namespace terrace::trainer::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullWarp = 0xffffffffU;

// All lanes take part and all get the result.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}
__device__ inline float warp_max(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// All kThreads threads take part and all get the result; memory written before is visible to the block after.
template <int kThreads>
__device__ float block_sum(float value) {
  __shared__ float partial[kThreads / kWarp];
  const float mine = warp_sum(value);
  __syncthreads();  // the last call's readers are done
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = mine;
  __syncthreads();
  float total = 0.0F;
  for (int i = 0; i < kThreads / kWarp; ++i) total += partial[i];
  return total;
}
template <int kThreads>
__device__ float block_max(float value) {
  __shared__ float partial[kThreads / kWarp];
  const float mine = warp_max(value);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = mine;
  __syncthreads();
  float largest = partial[0];
  for (int i = 1; i < kThreads / kWarp; ++i) largest = fmaxf(largest, partial[i]);
  return largest;
}

// How many threads of lower index have their flag set; *total gets how many have in all.
template <int kThreads>
__device__ int block_rank(bool flag, int* total) {
  __shared__ int counts[kThreads / kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned lanes_below = (1U << (threadIdx.x % kWarp)) - 1U;
  const unsigned votes = __ballot_sync(kFullWarp, flag);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) counts[warp] = __popc(votes);
  __syncthreads();
  int rank = __popc(votes & lanes_below);
  int all = 0;
  for (int i = 0; i < kThreads / kWarp; ++i) {
    if (i < warp) rank += counts[i];
    all += counts[i];
  }
  *total = all;
  return rank;
}

__device__ inline float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

}  // namespace terrace::trainer::cuda
