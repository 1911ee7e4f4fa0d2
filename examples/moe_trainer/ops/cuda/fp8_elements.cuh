// 8-bit numbers on the device, four at a time; the rules are those of ops/fp8.hpp. Included before tile.cuh,
// whose tiles may then be of such numbers.
#pragma once

#include <cuda_fp8.h>

#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/fp8.hpp"

namespace terrace::trainer::cuda {

__device__ inline float load_float(const E4m3* at) { return to_float(*at); }

// The magnitudes of two bf16 numbers, compared as they are; those of the upper one stay where they are.
struct PairMax {
  unsigned low = 0, high = 0;
  __device__ void take(unsigned pair) {
    low = max(low, pair & 0x7FFFU);
    high = max(high, pair & 0x7FFF0000U);
  }
  [[nodiscard]] __device__ unsigned either() const { return max(low, high >> 16); }
};

// Four numbers of one row, the first in the lowest byte. `factor`: the row's E4m3Scale::factor.
__device__ inline unsigned quantise_four(const float4& x, float factor) {
  if (isnan(factor)) return 0x7F7F7F7FU;
  const auto pair = [factor](float low, float high) {
    return static_cast<unsigned>(
        __nv_cvt_float2_to_fp8x2(float2{low * factor, high * factor}, __NV_SATFINITE, __NV_E4M3));
  };
  return pair(x.x, x.y) | pair(x.z, x.w) << 16;
}

}  // namespace terrace::trainer::cuda
