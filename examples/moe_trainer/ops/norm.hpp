// Norms over the last dimension. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/linear.hpp"

namespace terrace::trainer {

// y = x / rms(x) * w over the last dimension, rms(x) = sqrt(mean x^2 + eps). Any width: a head's q or k is a
// row of a narrow one. With a residual, x + residual takes x's place: it is written to `sum` (rounded to its
// type) and normalised. The two come together; sum may be x or residual.
struct RmsNorm {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  Out y;
  In residual = nullptr;
  Out sum = nullptr;
};
template <typename F>
void visit_arrays(RmsNorm& op, F&& visit) {
  visit(op.x, op.rows * op.width);
  visit(op.residual, op.rows * op.width);
  visit(op.sum, op.rows * op.width);
  visit(op.y, op.rows * op.width);
}
// x is what was normalised: the sum where there was a residual. d_sum is what else reaches it: added to d_x,
// which may be the same array.
struct RmsNormBackward {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  In d_y;
  Out d_x;
  Accumulate into_d_x = Accumulate::kOverwrite;
  float* d_w;  // (width), adds; null: not wanted
  In d_sum = nullptr;
};
template <typename F>
void visit_arrays(RmsNormBackward& op, F&& visit) {
  visit(op.x, op.rows * op.width);
  visit(op.d_y, op.rows * op.width);
  visit(op.d_sum, op.rows * op.width);
  visit(op.d_x, op.rows * op.width, op.into_d_x);
}
// The KDA output gate: y = rmsnorm(o) * w * sigmoid(gate), norm over each head's `width`.
struct GatedRmsNorm {
  std::int64_t rows, width;
  float eps;  // rows = tokens * heads
  In o;
  const float* w;
  In gate;  // (rows, width), (width), (rows, width)
  Out y;
};
template <typename F>
void visit_arrays(GatedRmsNorm& op, F&& visit) {
  visit(op.o, op.rows * op.width);
  visit(op.gate, op.rows * op.width);
  visit(op.y, op.rows * op.width);
}
struct GatedRmsNormBackward {
  std::int64_t rows, width;
  float eps;
  In o;
  const float* w;
  In gate;
  In d_y;
  Out d_o;
  Out d_gate;
  float* d_w;  // adds; null: not wanted
};
template <typename F>
void visit_arrays(GatedRmsNormBackward& op, F&& visit) {
  visit(op.o, op.rows * op.width);
  visit(op.gate, op.rows * op.width);
  visit(op.d_y, op.rows * op.width);
  visit(op.d_o, op.rows * op.width);
  visit(op.d_gate, op.rows * op.width);
}
// y = (x - mean) * rsqrt(var + eps) * w + b.
struct LayerNorm {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  const float* b;
  Out y;
};
template <typename F>
void visit_arrays(LayerNorm& op, F&& visit) {
  visit(op.x, op.rows * op.width);
  visit(op.y, op.rows * op.width);
}
struct LayerNormBackward {
  std::int64_t rows, width;
  float eps;
  In x;
  const float* w;
  In d_y;
  Out d_x;
  Accumulate into_d_x = Accumulate::kOverwrite;
  float* d_w;
  float* d_b;  // add; null: not wanted
};
template <typename F>
void visit_arrays(LayerNormBackward& op, F&& visit) {
  visit(op.x, op.rows * op.width);
  visit(op.d_y, op.rows * op.width);
  visit(op.d_x, op.rows * op.width, op.into_d_x);
}

}  // namespace terrace::trainer
