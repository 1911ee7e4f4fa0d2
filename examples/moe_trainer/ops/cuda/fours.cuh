// Elementwise kernels: a thread takes four neighbours, together where the arrays are aligned for it and all
// four exist, else one by one.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/elements.cuh"

namespace terrace::trainer::cuda {

enum class Access : std::uint8_t { kOneByOne, kFours };

struct Fours {
  std::int64_t count;
  Access access;

  [[nodiscard]] __device__ std::int64_t first() const {
    return 4 * (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x);
  }
  [[nodiscard]] __device__ bool together(std::int64_t i) const {
    return access == Access::kFours && i + 4 <= count;
  }
  // Missing ones are zero.
  [[nodiscard]] __device__ float4 load(In array, std::int64_t i) const {
    if (together(i)) return load_four(array, i);
    float four[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k < count) four[k] = load_one(array, i + k);
    }
    return {four[0], four[1], four[2], four[3]};
  }
  __device__ void store(Out array, std::int64_t i, float4 value) const {
    if (together(i)) return store_four(array, i, value);
    const float four[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k < count) store_one(array, i + k, four[k]);
    }
  }
};

template <typename... Arrays>
[[nodiscard]] Fours fours_of(std::int64_t count, const Arrays&... arrays) {
  return {count, (aligned_fours(arrays) && ...) ? Access::kFours : Access::kOneByOne};
}
[[nodiscard]] inline Grid grid_of_fours(std::int64_t count) { return grid_for(ceil_div(count, 4)); }

}  // namespace terrace::trainer::cuda
