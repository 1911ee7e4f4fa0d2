// s = sigmoid(logits);  choose top_k by s + bias inside the top_groups best groups, a group's score being the
// sum of its two best s + bias;  weight_j = scaling s_j / sum over the chosen of s.       logits: (T, E)
// weight: (T, k) Backward, S = sum of the chosen s: d_s_j = scaling / S (d_weight_j - sum_i d_weight_i s_i /
// S), d_logit = d_s s (1 - s) One warp a token. Ties go to the lower group and the lower expert.
#include <cfloat>

#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kTokensPerBlock = 4;
constexpr int kThreads = kTokensPerBlock * kWarp;

// The index of the largest value, the lowest such index; values are above -inf where they may be chosen, and
// one may.
__device__ int warp_argmax(const float* values, int count) {
  float best = -INFINITY;
  int best_at = count;
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < count; i += kWarp) {
    if (values[i] > best) {
      best = values[i];
      best_at = i;
    }
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kFullWarp, best, offset);
    const int other_at = __shfl_xor_sync(kFullWarp, best_at, offset);
    if (other > best || (other == best && other_at < best_at)) {
      best = other;
      best_at = other_at;
    }
  }
  return best_at;
}

// Keeps the values of the best groups and takes the others out of the choice.
__device__ void limit_groups(const RouterShape& shape, float* choice, float* group_scores) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int groups = static_cast<int>(shape.groups);
  const int members = static_cast<int>(shape.experts / shape.groups);
  for (int group = lane; group < groups; group += kWarp) {
    float first = -INFINITY;
    float second = -INFINITY;
    for (int i = 0; i < members; ++i) {
      const float value = choice[group * members + i];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    group_scores[group] = fmaxf(members > 1 ? first + second : first, -FLT_MAX);
  }
  __syncwarp();
  for (int i = 0; i < static_cast<int>(shape.top_groups); ++i) {
    const int chosen = warp_argmax(group_scores, groups);
    __syncwarp();
    if (lane == 0) group_scores[chosen] = -INFINITY;  // from here on: kept
    __syncwarp();
  }
  for (int e = lane; e < groups * members; e += kWarp) {
    if (group_scores[e / members] != -INFINITY) choice[e] = -INFINITY;
  }
  __syncwarp();
}

__global__ void route(Router op) {
  extern __shared__ float route_memory[];  // (tokens a block, experts + groups + top_k)
  const RouterShape& shape = op.shape;
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= shape.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int experts = static_cast<int>(shape.experts);
  const int top_k = static_cast<int>(shape.top_k);
  float* choice = route_memory + (threadIdx.x / kWarp) * (shape.experts + shape.groups + shape.top_k);
  float* group_scores = choice + experts;
  float* chosen_scores = group_scores + shape.groups;
  const float* logits = op.logits + token * experts;
  for (int e = lane; e < experts; e += kWarp) {
    // A NaN is the last choice, and still one: its weight is NaN and is seen.
    choice[e] = fmaxf(sigmoid(logits[e]) + op.bias[e], -FLT_MAX);
  }
  __syncwarp();
  if (shape.top_groups < shape.groups) limit_groups(shape, choice, group_scores);
  float sum = 0.0F;
  for (int j = 0; j < top_k; ++j) {
    const int chosen = warp_argmax(choice, experts);
    __syncwarp();
    const float score = sigmoid(logits[chosen]);
    sum += score;
    if (lane == 0) {
      choice[chosen] = -INFINITY;
      chosen_scores[j] = score;
      op.expert[token * top_k + j] = chosen;
    }
    __syncwarp();
  }
  for (int j = lane; j < top_k; j += kWarp)
    op.weight[token * top_k + j] = chosen_scores[j] / sum * shape.scaling;
}

__global__ void route_backward(RouterBackward op) {
  const RouterShape& shape = op.shape;
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= shape.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const float* logits = op.logits + token * shape.experts;
  const std::int32_t* expert = op.expert + token * shape.top_k;
  const float* d_weight = op.d_weight + token * shape.top_k;
  float* d_logits = op.d_logits + token * shape.experts;
  for (std::int64_t e = lane; e < shape.experts; e += kWarp) d_logits[e] = 0.0F;
  float scores = 0.0F;
  float products = 0.0F;
  for (std::int64_t j = lane; j < shape.top_k; j += kWarp) {
    const float score = sigmoid(logits[expert[j]]);
    scores += score;
    products += d_weight[j] * score;
  }
  const float sum = warp_sum(scores);
  const float mean = warp_sum(products) / sum;
  __syncwarp();  // the zeros above come first
  for (std::int64_t j = lane; j < shape.top_k; j += kWarp) {
    const float score = sigmoid(logits[expert[j]]);
    d_logits[expert[j]] = shape.scaling / sum * (d_weight[j] - mean) * score * (1.0F - score);
  }
}

}  // namespace

void launch(OpCall& call, const Router& op) {
  const RouterShape& shape = op.shape;
  call.set_shape({shape.tokens, shape.experts, shape.top_k, shape.groups, shape.top_groups});
  call.require(shape.groups >= 1 && shape.experts % shape.groups == 0, "groups must divide the experts");
  call.require(shape.top_groups >= 1 && shape.top_groups <= shape.groups, "top_groups must be 1 to groups");
  call.require(shape.top_k <= shape.top_groups * (shape.experts / shape.groups),
               "top_k is more than the experts of the kept groups");
  const auto numbers = static_cast<std::size_t>(shape.experts + shape.groups + shape.top_k);
  call.launch(route,
              Grid{.x = ceil_div(shape.tokens, kTokensPerBlock),
                   .threads = kThreads,
                   .shared_bytes = kTokensPerBlock * numbers * sizeof(float)},
              op);
}

void launch(OpCall& call, const RouterBackward& op) {
  call.set_shape({op.shape.tokens, op.shape.experts, op.shape.top_k});
  call.launch(route_backward, Grid{.x = ceil_div(op.shape.tokens, kTokensPerBlock), .threads = kThreads}, op);
}

}  // namespace terrace::trainer::cuda
