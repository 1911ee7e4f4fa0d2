// Scores of one token's row of logits. Only sources of ops/cpu include this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "examples/moe_trainer/ops/cpu/vec_math.hpp"
#include "examples/moe_trainer/ops/moe.hpp"

namespace terrace::trainer::cpu {

inline void scores_of(RouterScore score, const float* logits, std::int64_t experts, float* scores) {
  if (score == RouterScore::kSigmoid) {
    for (std::int64_t e = 0; e < experts; e += kLanes) {
      store_part(scores + e, sigmoid(load_part(logits + e, experts - e)), experts - e);
    }
    return;
  }
  const float top = experts > 0 ? *std::max_element(logits, logits + experts) : 0.0F;
  float total = 0;
  for (std::int64_t e = 0; e < experts; e += kLanes) {
    store_part(scores + e, exp(load_part(logits + e, experts - e) - top), experts - e);
  }
  for (std::int64_t e = 0; e < experts; ++e) total += scores[e];
  for (std::int64_t e = 0; e < experts; ++e) scores[e] /= total;
}

}  // namespace terrace::trainer::cpu
