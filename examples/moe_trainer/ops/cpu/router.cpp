// Routing. Selection is on scores + bias inside the best groups; weights are the bare scores of the selected.
//   sigmoid, renormalised: w_j = c s_j / Z, Z = sum s_j;  ds_j = c (dw_j - sum_i dw_i s_i / Z) / Z
//   softmax, renormalised: the softmax over the selected alone;  dl_j = w_j (dw_j - sum_i dw_i w_i / c)
//   not renormalised:      w_j = c s_j;  through softmax every logit of the row gets a gradient
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/router_scores.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kLast = std::numeric_limits<float>::lowest();  // a NaN: still to be chosen, after all others
constexpr std::int64_t kTokens = 64;                           // of a task

// Sum of a group's two best; of its only one where it has no second.
float group_score(const float* biased, std::int64_t size) {
  float best = kNever, second = kNever;
  for (std::int64_t i = 0; i < size; ++i) {
    if (biased[i] > best) {
      second = best;
      best = biased[i];
    } else if (biased[i] > second) {
      second = biased[i];
    }
  }
  return std::max(size > 1 ? best + second : best, kLast);
}

std::int64_t best_of(const float* values, std::int64_t count) {
  std::int64_t best = 0;
  for (std::int64_t i = 1; i < count; ++i) {
    if (values[i] > values[best]) best = i;
  }
  return best;
}

// Experts outside the best groups can't be chosen. Ties go to the lower group.
void limit_groups(const RouterShape& shape, float* biased, float* groups) {
  if (shape.groups <= 1 || shape.top_groups >= shape.groups) return;
  const std::int64_t size = shape.experts / shape.groups;
  for (std::int64_t g = 0; g < shape.groups; ++g) groups[g] = group_score(biased + g * size, size);
  std::vector<bool> kept(static_cast<std::size_t>(shape.groups), false);
  for (std::int64_t n = 0; n < shape.top_groups; ++n) {
    const std::int64_t g = best_of(groups, shape.groups);
    kept[static_cast<std::size_t>(g)] = true;
    groups[g] = kNever;
  }
  for (std::int64_t e = 0; e < shape.experts; ++e) {
    if (!kept[static_cast<std::size_t>(e / size)]) biased[e] = kNever;
  }
}

// The weights of a token's selected experts, before scaling.
void unscaled_weights(const RouterShape& shape, const float* logits, const std::int32_t* expert,
                      float* weight) {
  const bool softmax = shape.score == RouterScore::kSoftmax, whole = shape.renormalise == Renormalise::kYes;
  if (softmax) {
    // Renormalised, only the selected count, and their largest keeps the quotient from 0 / 0.
    float top = kNever, total = 0;
    const std::int64_t count = whole ? shape.top_k : shape.experts;
    const auto logit = [&](std::int64_t i) { return logits[whole ? expert[i] : i]; };
    for (std::int64_t i = 0; i < count; ++i) top = std::max(top, logit(i));
    for (std::int64_t i = 0; i < count; ++i) total += std::exp(logit(i) - top);
    for (std::int64_t j = 0; j < shape.top_k; ++j) weight[j] = std::exp(logits[expert[j]] - top) / total;
    return;
  }
  float total = 0;
  for (std::int64_t j = 0; j < shape.top_k; ++j) {
    weight[j] = 1.0F / (1.0F + std::exp(-logits[expert[j]]));
    total += weight[j];
  }
  if (!whole) return;
  for (std::int64_t j = 0; j < shape.top_k; ++j) weight[j] = total == 0 ? 0.0F : weight[j] / total;
}

void route(const Router& op, std::int64_t token, float* scores, float* biased, float* groups) {
  const RouterShape& shape = op.shape;
  const float* logits = op.logits + token * shape.experts;
  std::int32_t* expert = op.expert + token * shape.top_k;
  float* weight = op.weight + token * shape.top_k;
  scores_of(shape.score, logits, shape.experts, scores);
  for (std::int64_t e = 0; e < shape.experts; ++e) {
    const float value = scores[e] + (op.bias == nullptr ? 0.0F : op.bias[e]);
    biased[e] = value > kLast ? value : kLast;
  }
  limit_groups(shape, biased, groups);
  for (std::int64_t j = 0; j < shape.top_k; ++j) {
    const std::int64_t e = best_of(biased, shape.experts);
    biased[e] = kNever;
    expert[j] = static_cast<std::int32_t>(e);
  }
  unscaled_weights(shape, logits, expert, weight);
  for (std::int64_t j = 0; j < shape.top_k; ++j) weight[j] *= shape.scaling;
}

void route_backward(const RouterBackward& op, std::int64_t token, float* weight, float* scores) {
  const RouterShape& shape = op.shape;
  const float* logits = op.logits + token * shape.experts;
  const std::int32_t* expert = op.expert + token * shape.top_k;
  const float* d_weight = op.d_weight + token * shape.top_k;
  float* d_logits = op.d_logits + token * shape.experts;
  const bool softmax = shape.score == RouterScore::kSoftmax, whole = shape.renormalise == Renormalise::kYes;
  unscaled_weights(shape, logits, expert, weight);
  float along = 0;
  for (std::int64_t j = 0; j < shape.top_k; ++j) along += d_weight[j] * weight[j];
  if (softmax && !whole) {
    scores_of(shape.score, logits, shape.experts, scores);
    for (std::int64_t e = 0; e < shape.experts; ++e) d_logits[e] = -shape.scaling * scores[e] * along;
  } else {
    std::fill_n(d_logits, shape.experts, 0.0F);
  }
  for (std::int64_t j = 0; j < shape.top_k; ++j) {
    // Of a weight its share of the sum, and of a sigmoid its slope over itself.
    const float slope = softmax ? 1.0F : 1.0F / (1.0F + std::exp(logits[expert[j]]));
    const float beyond = whole ? along : 0.0F;
    d_logits[expert[j]] += shape.scaling * weight[j] * (d_weight[j] - beyond) * slope;
  }
}

}  // namespace

Bytes scratch_bytes(const Router& op) {
  const RouterShape& shape = op.shape;
  const std::int64_t groups = std::max<std::int64_t>(1, shape.groups);
  const std::int64_t open = groups > 1 ? std::min(shape.top_groups, groups) : 1;
  if (shape.experts % groups != 0 || shape.top_k < 1 || shape.top_k > shape.experts / groups * open) {
    throw std::runtime_error(
        "router: top_k must fit the experts of the kept groups, groups divide the experts");
  }
  return Bytes(static_cast<std::uint64_t>((2 * shape.experts + groups) * worker_count()) * sizeof(float));
}

void compute(const Router& op, std::byte* scratch) {
  const std::int64_t experts = op.shape.experts, groups = std::max<std::int64_t>(1, op.shape.groups);
  auto* base = reinterpret_cast<float*>(scratch);
  parallel_for((op.shape.tokens + kTokens - 1) / kTokens, [&](std::int64_t task, std::int64_t worker) {
    float* scores = base + worker * (2 * experts + groups);
    const std::int64_t end = std::min(op.shape.tokens, (task + 1) * kTokens);
    for (std::int64_t token = task * kTokens; token < end; ++token) {
      route(op, token, scores, scores + experts, scores + 2 * experts);
    }
  });
}

Bytes scratch_bytes(const RouterBackward& op) {
  return Bytes(static_cast<std::uint64_t>((op.shape.experts + op.shape.top_k) * worker_count()) *
               sizeof(float));
}

void compute(const RouterBackward& op, std::byte* scratch) {
  const RouterShape& shape = op.shape;
  auto* base = reinterpret_cast<float*>(scratch);
  parallel_for((shape.tokens + kTokens - 1) / kTokens, [&](std::int64_t task, std::int64_t worker) {
    float* scores = base + worker * (shape.experts + shape.top_k);
    const std::int64_t end = std::min(shape.tokens, (task + 1) * kTokens);
    for (std::int64_t token = task * kTokens; token < end; ++token) {
      route_backward(op, token, scores + shape.experts, scores);
    }
  });
}

}  // namespace terrace::trainer::cpu
