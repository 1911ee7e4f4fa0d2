// The softmax over a token's chosen positions, and sums weighted by it, for the forward and the backward
// kernels.
#pragma once

#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {

// Row `token` of selected, and where its sequence starts among all tokens.
struct DsaChosen {
  const std::int32_t* positions;  // (slots), -1: padding, never followed
  std::int64_t sequence;
};
__device__ inline DsaChosen dsa_chosen(const DsaSizes& sizes, const std::int32_t* selected,
                                       std::int64_t token) {
  return {selected + token * sizes.slots, token / sizes.length * sizes.length};
}

// <left, row of the chosen position> by one warp, in every lane; 0 for padding.
__device__ inline float dsa_dot(const DsaChosen& chosen, std::int64_t slot, const float* left,
                                const float* rows, std::int64_t width) {
  const std::int32_t position = chosen.positions[slot];
  if (position < 0) return 0.0F;  // the same for the whole warp
  const float* right = rows + (chosen.sequence + position) * width;
  float sum = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) sum += left[c] * right[c];
  return warp_sum(sum);
}

// sum over slots of factor[slot] rows[chosen position][column], by one thread.
__device__ inline float dsa_weighted(const DsaSizes& sizes, const DsaChosen& chosen, const float* factor,
                                     const float* rows, std::int64_t width, std::int64_t column) {
  float sum = 0.0F;
  for (std::int64_t slot = 0; slot < sizes.slots; ++slot) {
    const std::int32_t position = chosen.positions[slot];
    if (position >= 0) sum += factor[slot] * rows[(chosen.sequence + position) * width + column];
  }
  return sum;
}

struct DsaAttention {
  DsaSizes sizes;
  const float* q;
  const float* k;
  const float* sink;  // null: none
  const std::int32_t* selected;
};

// p[slot] = e^(a - lse), 0 for padding, with a = scale q k^T and lse = log(sum e^a + e^sink). The block of
// kDsaThreads works together, and sees p on return. Returns the sink's own probability. Nothing chosen and no
// sink: all zero.
__device__ inline float dsa_probabilities(const DsaAttention& a, const DsaChosen& chosen, std::int64_t token,
                                          std::int64_t head, float* p) {
  const DsaSizes& sizes = a.sizes;
  const float* q = a.q + (token * sizes.heads + head) * sizes.key_width;
  for (std::int64_t slot = threadIdx.x / kWarp; slot < sizes.slots; slot += kDsaThreads / kWarp) {
    const float logit = dsa_dot(chosen, slot, q, a.k, sizes.key_width) * sizes.scale;
    if (threadIdx.x % kWarp == 0) p[slot] = chosen.positions[slot] >= 0 ? logit : -INFINITY;
  }
  __syncthreads();
  const float sink = a.sink != nullptr ? a.sink[head] : -INFINITY;
  float largest = sink;
  for (std::int64_t slot = threadIdx.x; slot < sizes.slots; slot += kDsaThreads)
    largest = fmaxf(largest, p[slot]);
  largest = block_max<kDsaThreads>(largest);
  const float top = largest == -INFINITY ? 0.0F : largest;
  float sum = 0.0F;
  for (std::int64_t slot = threadIdx.x; slot < sizes.slots; slot += kDsaThreads) {
    const float e = expf(p[slot] - top);
    p[slot] = e;
    sum += e;
  }
  const float sink_share = expf(sink - top);
  const float total = block_sum<kDsaThreads>(sum) + sink_share;
  const float inverse = total > 0.0F ? 1.0F / total : total;  // a NaN passes on
  for (std::int64_t slot = threadIdx.x; slot < sizes.slots; slot += kDsaThreads) p[slot] *= inverse;
  __syncthreads();
  return sink_share * inverse;
}

}  // namespace terrace::trainer::cuda
