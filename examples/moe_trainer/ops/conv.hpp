// The short convolution in front of KDA. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// y = silu(conv(x)), depthwise, causal, no bias: y[t] = silu(sum_j w[j] x[t - taps + 1 + j]), zero before the
// start.
struct CausalConv {
  std::int64_t batch, length, channels, taps;
  In x;
  const float* w;
  Out y;
};  // (B,T,C), (C,taps)
struct CausalConvBackward {
  std::int64_t batch, length, channels, taps;
  In x;
  const float* w;
  In d_y;
  Out d_x;
  float* d_w;  // (C, taps), adds
};

}  // namespace terrace::trainer
