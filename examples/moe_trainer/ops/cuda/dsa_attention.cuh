// The softmax over a token's chosen positions, and sums weighted by it, for the general forward and backward
// kernels. T: float or Bf16, the type of the activations.
#pragma once

#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {

// Row `token` of selected, and where its batch row starts among all tokens.
struct DsaChosen {
  const std::int32_t* positions;  // (slots), -1: padding, never followed
  std::int64_t sequence;
};
__device__ inline DsaChosen dsa_chosen(const DsaSizes& sizes, const std::int32_t* selected,
                                       std::int64_t token) {
  return {selected + token * sizes.slots, token / sizes.length * sizes.length};
}

// A row of `width` numbers a token, `stride` apart: values may be the start of the key rows.
template <typename T>
struct DsaRows {
  const T* at;
  std::int64_t width, stride;
};
template <typename T>
[[nodiscard]] DsaRows<T> dsa_key_rows(const DsaSizes& sizes, const DsaInputs& in) {
  return {in.k.as<T>(), sizes.key_width, sizes.key_width};
}
template <typename T>
[[nodiscard]] DsaRows<T> dsa_value_rows(const DsaSizes& sizes, const DsaInputs& in) {
  if (!in.v) return {in.k.as<T>(), sizes.value_width, sizes.key_width};
  return {in.v.as<T>(), sizes.value_width, sizes.value_width};
}

// <left, row of the chosen position> by one warp, in every lane; 0 for padding.
template <typename Left, typename T>
__device__ float dsa_dot(const DsaChosen& chosen, std::int64_t slot, const Left* left,
                         const DsaRows<T>& rows) {
  const std::int32_t position = chosen.positions[slot];
  if (position < 0) return 0.0F;  // the same for the whole warp
  const T* right = rows.at + (chosen.sequence + position) * rows.stride;
  float sum = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < rows.width; c += kWarp)
    sum += load_float(left + c) * load_float(right + c);
  return warp_sum(sum);
}

// sum over slots of factor[slot] rows[chosen position][column], by one thread.
template <typename T>
__device__ float dsa_weighted(const DsaSizes& sizes, const DsaChosen& chosen, const float* factor,
                              const DsaRows<T>& rows, std::int64_t column) {
  float sum = 0.0F;
  for (std::int64_t slot = 0; slot < sizes.slots; ++slot) {
    const std::int32_t position = chosen.positions[slot];
    if (position >= 0)
      sum += factor[slot] * load_float(rows.at + (chosen.sequence + position) * rows.stride + column);
  }
  return sum;
}

template <typename T>
struct DsaAttention {
  DsaSizes sizes;
  const T* q;
  DsaRows<T> k;
  const float* sink;  // null: none
  const std::int32_t* selected;
};

struct DsaNormalised {
  float p_sink, lse;
};
// p[slot] = e^(a - lse), 0 for padding, with a = scale q k^T and lse = log(sum e^a + e^sink). The block of
// kDsaThreads works together, and sees p on return. Returns the sink's own probability and lse. Nothing
// chosen and no sink: all zero, and lse -inf.
template <typename T>
__device__ DsaNormalised dsa_probabilities(const DsaAttention<T>& a, const DsaChosen& chosen,
                                           std::int64_t token, std::int64_t head, float* p) {
  const DsaSizes& sizes = a.sizes;
  const T* q = a.q + (token * sizes.heads + head) * sizes.key_width;
  for (std::int64_t slot = threadIdx.x / kWarp; slot < sizes.slots; slot += kDsaThreads / kWarp) {
    const float logit = dsa_dot(chosen, slot, q, a.k) * sizes.scale;
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
  return {sink_share * inverse, top + logf(total)};
}

}  // namespace terrace::trainer::cuda
