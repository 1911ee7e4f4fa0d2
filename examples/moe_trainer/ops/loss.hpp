// The loss over a large vocabulary. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// loss_sum += sum over counted tokens of (lse - logit of the label); labels of -100 count for nothing.
// Gradients are of gradient_scale * (that sum): pass 1 / counted labels for the mean. Any sizes from 1 on.
//
// hidden, weight and d_hidden are of one type; sums are fp32, also those behind bf16 arrays. Exact: no term
// is left out, and bf16 probabilities keep bf16's relative error however large the logits are.
//
// Logits never exist whole. Scratch is bounded for every shape: on CUDA by kLossScratchBytes (the workspace
// that cuBLAS has for each stream not counted), on the CPU by 16 MiB and, for bf16, the fp32 copies of the
// arrays.
//
// A label outside the vocabulary that is not -100 is the caller's error: the CPU stops the program and says
// so; CUDA reads nothing outside the arrays and makes the loss NaN.
struct LinearCrossEntropy {
  std::int64_t tokens, width, vocabulary;
  In hidden;                   // (T, D)
  In weight;                   // (V, D)
  const std::int32_t* labels;  // (T)
  float gradient_scale;
  float* loss_sum;  // (1), adds
  Out d_hidden;     // (T, D); null: not wanted
  float* d_weight;  // (V, D), adds; null: not wanted. Neither: forward only
};
template <typename F>
void visit_arrays(LinearCrossEntropy& op, F&& visit) {
  visit(op.hidden, op.tokens * op.width);
  visit(op.weight, op.vocabulary * op.width);
  visit(op.d_hidden, op.tokens * op.width);
}

inline constexpr std::int64_t kLossScratchBytes = 610LL << 20;

}  // namespace terrace::trainer
