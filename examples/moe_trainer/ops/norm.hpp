// Norms over the last dimension. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/linear.hpp"

namespace terrace::trainer {

// y = x / rms(x) * w over the last dimension, rms(x) = sqrt(mean x^2 + eps).
struct RmsNorm {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  Out y;
};
struct RmsNormBackward {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  In d_y;
  Out d_x;
  Accumulate into_d_x = Accumulate::kOverwrite;
  float* d_w;  // (width), adds
};
// The KDA output gate: y = rmsnorm(o) * w * sigmoid(gate), norm over each head's `width`.
struct GatedRmsNorm {
  std::int64_t rows, width;
  float eps;  // rows = tokens * heads
  In o;
  const float* w;
  In gate;  // (rows, width), (width), (rows, width)
  Out y;
};
struct GatedRmsNormBackward {
  std::int64_t rows, width;
  float eps;
  In o;
  const float* w;
  In gate;
  In d_y;
  Out d_o;
  Out d_gate;
  float* d_w;  // adds
};
// y = (x - mean) * rsqrt(var + eps) * w + b.
struct LayerNorm {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  const float* b;
  Out y;
};
struct LayerNormBackward {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  In d_y;
  Out d_x;
  Accumulate into_d_x = Accumulate::kOverwrite;
  float* d_w;
  float* d_b;  // add
};

}  // namespace terrace::trainer
