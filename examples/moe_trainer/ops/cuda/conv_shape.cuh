// Tokens of the causal convolution: where they lie and which sequence they belong to.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"
#include "examples/moe_trainer/ops/cuda/packing.cuh"

namespace terrace::trainer::cuda {

struct ConvShape {
  std::int64_t tokens, length, channels, taps;  // tokens = batch * length
  Packing packing;
  std::int64_t x_stride, y_stride;
};
template <typename Op>
[[nodiscard]] ConvShape conv_shape(const Op& op) {
  return {op.batch * op.length,
          op.length,
          op.channels,
          op.taps,
          op.packing,
          op.x_stride == 0 ? op.channels : op.x_stride,
          op.y_stride == 0 ? op.channels : op.y_stride};
}

// The sequence of a token: [start, end).
struct Sequence {
  std::int64_t start, end;
};
__device__ inline Sequence sequence_of(const Packing& packing, std::int64_t length, std::int64_t token) {
  if (packing.starts == nullptr) {
    const std::int64_t start = token - token % length;
    return {start, start + length};
  }
  const std::int64_t index = sequence_index(packing, token);
  return {packing.starts[index], packing.starts[index + 1]};
}

}  // namespace terrace::trainer::cuda
