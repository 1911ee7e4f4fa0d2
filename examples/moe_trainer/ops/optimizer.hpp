// Optimizers and what they need. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

struct SumOfSquares {
  std::int64_t count;
  const float* x;
  float* out;
};  // out (1), adds
// Gradient clipping is part of it: g is scaled by min(1, clip_norm / sqrt(*sum_of_squares)); clip_norm 0:
// off.
struct AdamW {
  std::int64_t count;
  float* parameter;
  const float* gradient;
  float* m;
  float* v;
  float learning_rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // step counts from 1
  const float* sum_of_squares;
  float clip_norm;
};

}  // namespace terrace::trainer
