// What the kernels of the backward pass share: finding a key's slot, and writing P, dA and dx
// (dsa_backward_hopper.hpp) from the accumulators that hold them.
#pragma once

#include "examples/moe_trainer/ops/cuda/dsa_backward_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/dsa_hopper.cuh"

namespace terrace::trainer::cuda {

// How many of the ascending positions are less than `position`. Padding is larger than any position as an
// unsigned number.
__device__ inline int slot_of(const std::int32_t* positions, int slots, std::int32_t position) {
  int low = 0;
  int high = slots;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (static_cast<unsigned>(__ldg(positions + middle)) < static_cast<unsigned>(position)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Across a warp: an 8 x 8 matrix of bf16, of which lane l has columns 2 (l % 4) and + 1 of row l / 4, becomes
// its transpose.
__device__ inline std::uint32_t transpose_8x8(std::uint32_t pair) {
  std::uint32_t across = 0;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(across) : "r"(pair));
  return across;
}

// An accumulator of 64 heads by 2 kCount slots, rounded, to rows of 64 heads, slot after slot.
template <int kCount>
__device__ inline void store_slot_rows(const float (&d)[kCount], Bf16* rows) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup, lane = thread % kWarp;
  const bool odd = lane % 2 == 1;
  const int slot = lane % 4 / 2 * 16 + lane / 4, head = thread / kWarp * 16 + lane % 2 * 8;
#pragma unroll
  for (int group = 0; group < kCount / 16; ++group) {
    // Of slot 8 (lane % 4) + lane / 4: eight heads, and eight more.
    uint4 piece[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        word[j] =
            transpose_8x8(as_pair(d[group * 16 + j * 4 + half * 2], d[group * 16 + j * 4 + half * 2 + 1]));
      }
      piece[half] = transpose_quad(word);
    }
    // Two lanes write the 32 bytes of one's slot, then those of the other's.
    const uint4 given = odd ? piece[0] : piece[1];
    const uint4 got =
        make_uint4(__shfl_xor_sync(kFullWarp, given.x, 1), __shfl_xor_sync(kFullWarp, given.y, 1),
                   __shfl_xor_sync(kFullWarp, given.z, 1), __shfl_xor_sync(kFullWarp, given.w, 1));
    Bf16* at = rows + (group * 32 + slot) * kDsaHeads + head;
    *reinterpret_cast<uint4*>(at) = odd ? got : piece[0];
    *reinterpret_cast<uint4*>(at + 8 * kDsaHeads) = odd ? piece[1] : got;
  }
}

}  // namespace terrace::trainer::cuda
