// The short convolution in front of KDA. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// y = silu(conv(x)), depthwise, causal, no bias: y[t] = silu(sum_j w[j] x[t - taps + 1 + j]), zero before the
// start of the sequence. taps 1 to 16. A stride is the distance from one token to the next, for channels that
// lie in wider rows; 0: `channels`. What lies between is not touched.
struct CausalConv {
  std::int64_t batch, length, channels, taps;
  In x;            // (B, T, C)
  const float* w;  // (C, taps)
  Out y;
  Packing packing = {};  // then batch is 1
  std::int64_t x_stride = 0, y_stride = 0;
};
struct CausalConvBackward {
  std::int64_t batch, length, channels, taps;
  In x;
  const float* w;
  In d_y;
  Out d_x;     // null: not wanted
  float* d_w;  // (C, taps), adds; null: not wanted
  Packing packing = {};
  std::int64_t x_stride = 0, y_stride = 0;  // of x and d_x, of d_y
};

// Elements from the first token to the end of the last.
[[nodiscard]] constexpr std::int64_t strided_count(std::int64_t tokens, std::int64_t channels,
                                                   std::int64_t stride) {
  return tokens <= 0 ? 0 : (tokens - 1) * (stride == 0 ? channels : stride) + channels;
}
template <typename F>
void visit_arrays(CausalConv& op, F&& visit) {
  visit(op.x, strided_count(op.batch * op.length, op.channels, op.x_stride));
  visit(op.y, strided_count(op.batch * op.length, op.channels, op.y_stride));
}
template <typename F>
void visit_arrays(CausalConvBackward& op, F&& visit) {
  visit(op.x, strided_count(op.batch * op.length, op.channels, op.x_stride));
  visit(op.d_y, strided_count(op.batch * op.length, op.channels, op.y_stride));
  visit(op.d_x, strided_count(op.batch * op.length, op.channels, op.x_stride));
}

}  // namespace terrace::trainer
