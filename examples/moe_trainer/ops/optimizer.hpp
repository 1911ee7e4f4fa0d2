// AdamW and what it needs; Muon is in muon.hpp. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

struct SumOfSquares {
  std::int64_t count;
  In x;
  float* out;
};  // out (1), adds
template <typename F>
void visit_arrays(SumOfSquares& op, F&& visit) {
  visit(op.x, op.count);
}
// The parameter and both moments are fp32, the gradient of either type. Gradient clipping is part of it: g is
// scaled by min(1, clip_norm / sqrt(*sum_of_squares)); clip_norm 0: off. The new parameter also goes to
// compute_copy, in its type, where one is given.
struct AdamW {
  std::int64_t count;
  float* parameter;
  In gradient;
  float* m;
  float* v;
  float learning_rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // step counts from 1
  const float* sum_of_squares;
  float clip_norm;
  Out compute_copy = nullptr;
};
template <typename F>
void visit_arrays(AdamW& op, F&& visit) {
  visit(op.gradient, op.count);
  visit(op.compute_copy, op.count);
}

}  // namespace terrace::trainer
