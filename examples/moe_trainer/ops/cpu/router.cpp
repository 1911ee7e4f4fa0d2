// Sigmoid routing. Selection is on scores + bias inside the best groups; weights are the bare scores of the
// selected, renormalised: w_j = c s_j / Z, Z = sum s_j. Backward: ds_j = c (dw_j - sum_i dw_i s_i / Z) / Z.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kTokens = 64;  // of a task

void scores_of(const float* logits, std::int64_t experts, float* scores) {
  for (std::int64_t e = 0; e < experts; e += kLanes) {
    store_part(scores + e, sigmoid(load_part(logits + e, experts - e)), experts - e);
  }
}

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
  return size > 1 ? best + second : best;
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

void route(const Router& op, std::int64_t token, float* scores, float* biased, float* groups) {
  const RouterShape& shape = op.shape;
  scores_of(op.logits + token * shape.experts, shape.experts, scores);
  for (std::int64_t e = 0; e < shape.experts; ++e) biased[e] = scores[e] + op.bias[e];
  limit_groups(shape, biased, groups);
  float total = 0;
  for (std::int64_t j = 0; j < shape.top_k; ++j) {
    const std::int64_t e = best_of(biased, shape.experts);
    biased[e] = kNever;
    op.expert[token * shape.top_k + j] = static_cast<std::int32_t>(e);
    op.weight[token * shape.top_k + j] = scores[e];
    total += scores[e];
  }
  const float factor = total > 0 ? shape.scaling / total : 0.0F;
  for (std::int64_t j = 0; j < shape.top_k; ++j) op.weight[token * shape.top_k + j] *= factor;
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

void compute(const RouterBackward& op, std::byte*) {
  const RouterShape& shape = op.shape;
  parallel_ranges(shape.tokens, kTokens, [&](std::int64_t begin, std::int64_t end) {
    std::fill_n(op.d_logits + begin * shape.experts, (end - begin) * shape.experts, 0.0F);
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int32_t* expert = op.expert + token * shape.top_k;
      const float* d_weight = op.d_weight + token * shape.top_k;
      const auto score = [&](std::int64_t j) {
        return 1.0F / (1.0F + std::exp(-op.logits[token * shape.experts + expert[j]]));
      };
      float total = 0, along = 0;
      for (std::int64_t j = 0; j < shape.top_k; ++j) {
        total += score(j);
        along += d_weight[j] * score(j);
      }
      if (!(total > 0)) continue;
      for (std::int64_t j = 0; j < shape.top_k; ++j) {
        const float s = score(j), d_s = shape.scaling * (d_weight[j] - along / total) / total;
        op.d_logits[token * shape.experts + expert[j]] = d_s * s * (1.0F - s);
      }
    }
  });
}

}  // namespace terrace::trainer::cpu
