// score = sigmoid(logit) or softmax over all;  choose top_k by score + bias inside the top_groups best
// groups; weight_j = scaling score_j, over the sum of the chosen scores where renormalised.          logits:
// (T, E) Renormalised softmax is the softmax over the chosen alone.                                 weight:
// (T, k) Backward, w = weight / scaling, m = sum_i d_weight_i w_i (0 for m where a sigmoid is not
// renormalised):
//   d_logit_j = scaling w_j (d_weight_j - m) (sigmoid: times 1 - s_j);  softmax over all: the others -scaling
//   p m
// One warp a token. Ties go to the lower group and the lower expert.
#include <cfloat>

#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/router_scores.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kTokensPerBlock = 4;
constexpr int kThreads = kTokensPerBlock * kWarp;

// Takes the experts outside the best groups out of the choice. A group's score is the sum of its two best.
__device__ void limit_groups(const RouterShape& shape, unsigned* choice, unsigned* group_keys) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int groups = static_cast<int>(shape.groups);
  const int members = static_cast<int>(shape.experts / shape.groups);
  for (int group = lane; group < groups; group += kWarp) {
    unsigned first = 0;
    unsigned second = 0;
    for (int i = 0; i < members; ++i) {
      const unsigned key = choice[group * members + i];
      second = max(second, min(first, key));
      first = max(first, key);
    }
    const float score = members > 1 ? value_of_key(first) + value_of_key(second) : value_of_key(first);
    group_keys[group] = order_key(fmaxf(score, -FLT_MAX));
  }
  __syncwarp();
  WarpSelection best(group_keys, groups);
  for (int i = 0; i < static_cast<int>(shape.top_groups); ++i) (void)best.take();  // from here on: kept
  __syncwarp();
  for (int e = lane; e < groups * members; e += kWarp) {
    if (group_keys[e / members] != 0) choice[e] = 0;
  }
  __syncwarp();
}

__device__ ScoreBase weight_base(const RouterShape& shape, const float* logits, const std::int32_t* expert) {
  if (shape.renormalise == Renormalise::kYes) {
    return score_base(shape.score, true, static_cast<int>(shape.top_k),
                      [=](int j) { return logits[expert[j]]; });
  }
  return score_base(shape.score, false, static_cast<int>(shape.experts), [=](int e) { return logits[e]; });
}

__global__ void route(Router op) {
  extern __shared__ unsigned route_memory[];  // (tokens a block, experts + groups + top_k)
  const RouterShape& shape = op.shape;
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= shape.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int experts = static_cast<int>(shape.experts);
  const int top_k = static_cast<int>(shape.top_k);
  unsigned* choice = route_memory + (threadIdx.x / kWarp) * (shape.experts + shape.groups + shape.top_k);
  unsigned* group_keys = choice + experts;
  auto* chosen = reinterpret_cast<std::int32_t*>(group_keys + shape.groups);
  const float* logits = op.logits + token * experts;
  const ScoreBase base = score_base(shape.score, false, experts, [=](int e) { return logits[e]; });
  for (int e = lane; e < experts; e += kWarp) {
    const float bias = op.bias == nullptr ? 0.0F : op.bias[e];
    // A NaN is the last choice, and still one: its weight is NaN and is seen.
    choice[e] = order_key(fmaxf(share_of(shape.score, logits[e], base) + bias, -FLT_MAX));
  }
  __syncwarp();
  if (shape.top_groups < shape.groups) limit_groups(shape, choice, group_keys);
  WarpSelection best(choice, experts);
  for (int j = 0; j < top_k; ++j) {
    const int expert = best.take();
    if (lane == 0) chosen[j] = expert;
  }
  __syncwarp();
  const ScoreBase whole = weight_base(shape, logits, chosen);
  for (int j = lane; j < top_k; j += kWarp) {
    op.expert[token * top_k + j] = chosen[j];
    op.weight[token * top_k + j] = share_of(shape.score, logits[chosen[j]], whole) * shape.scaling;
  }
}

__global__ void route_backward(RouterBackward op) {
  const RouterShape& shape = op.shape;
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= shape.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool softmax = shape.score == RouterScore::kSoftmax;
  const bool renormalised = shape.renormalise == Renormalise::kYes;
  const float* logits = op.logits + token * shape.experts;
  const std::int32_t* expert = op.expert + token * shape.top_k;
  const float* d_weight = op.d_weight + token * shape.top_k;
  float* d_logits = op.d_logits + token * shape.experts;
  const ScoreBase base = weight_base(shape, logits, expert);
  float products = 0.0F;
  for (std::int64_t j = lane; j < shape.top_k; j += kWarp) {
    products += d_weight[j] * share_of(shape.score, logits[expert[j]], base);
  }
  const float mean = softmax || renormalised ? warp_sum(products) : 0.0F;
  const bool all_depend = softmax && !renormalised;
  for (std::int64_t e = lane; e < shape.experts; e += kWarp) {
    d_logits[e] = all_depend ? -shape.scaling * mean * share_of(shape.score, logits[e], base) : 0.0F;
  }
  __syncwarp();  // the row above comes first
  for (std::int64_t j = lane; j < shape.top_k; j += kWarp) {
    const float logit = logits[expert[j]];
    const float slope = softmax ? 1.0F : 1.0F / (1.0F + expf(logit));
    d_logits[expert[j]] = shape.scaling * share_of(shape.score, logit, base) * (d_weight[j] - mean) * slope;
  }
}

}  // namespace

void launch(OpCall& call, const Router& op) {
  const RouterShape& shape = op.shape;
  call.set_shape({shape.tokens, shape.experts, shape.top_k, shape.groups, shape.top_groups});
  call.require(shape.groups >= 1 && shape.experts % shape.groups == 0, "groups must divide the experts");
  call.require(shape.top_groups >= 1 && shape.top_groups <= shape.groups, "top_groups must be 1 to groups");
  call.require(shape.top_k >= 1 && shape.top_k <= shape.top_groups * (shape.experts / shape.groups),
               "top_k is not 1 to the experts of the kept groups");
  const auto numbers = static_cast<std::size_t>(shape.experts + shape.groups + shape.top_k);
  call.launch(route,
              Grid{.x = ceil_div(shape.tokens, kTokensPerBlock),
                   .threads = kThreads,
                   .shared_bytes = kTokensPerBlock * numbers * sizeof(unsigned)},
              op);
}

void launch(OpCall& call, const RouterBackward& op) {
  call.set_shape({op.shape.tokens, op.shape.experts, op.shape.top_k});
  call.launch(route_backward, Grid{.x = ceil_div(op.shape.tokens, kTokensPerBlock), .threads = kThreads}, op);
}

}  // namespace terrace::trainer::cuda
