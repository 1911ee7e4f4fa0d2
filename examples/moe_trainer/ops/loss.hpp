// The loss over a large vocabulary. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// loss_sum += sum over counted tokens of (lse - logit of the label); labels of -100 count for nothing.
// Gradients are of gradient_scale * (that sum): pass 1 / counted labels for the mean. Chunked: logits never
// exist whole.
struct LinearCrossEntropy {
  std::int64_t tokens, width, vocabulary;
  In hidden;
  In weight;
  const std::int32_t* labels;  // (T, D), (V, D), (T)
  float gradient_scale;
  float* loss_sum;  // (1), adds
  Out d_hidden;  // (T, D); null: forward only
  float* d_weight;  // (V, D), adds; null: forward only
};

}  // namespace terrace::trainer
