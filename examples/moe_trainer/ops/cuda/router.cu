// score = sigmoid(logit) or softmax over all;  choose top_k by score + bias inside the top_groups best
// groups; weight_j = scaling score_j, over the sum of the chosen scores where renormalised.
//   logits: (T, E)   weight: (T, k)
// Renormalised softmax is the softmax over the chosen alone.
// Backward, w = weight / scaling, m = sum_i d_weight_i w_i (0 for m where a sigmoid is not renormalised):
//   d_logit_j = scaling w_j (d_weight_j - m) (sigmoid: times 1 - s_j)
//   softmax over all: the others -scaling p m
// One warp a token. Ties go to the lower group and the lower expert. Where a lane can hold its share of the
// experts, E / 32 neighbours, in registers, it does; else they lie in shared memory.
#include <cfloat>
#include <type_traits>

#include "examples/moe_trainer/ops/cuda/elements.cuh"
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

constexpr int kPart = 8;  // of a lane's experts: what is looked through when one of them is taken

// A lane's share of the experts, E / 32 in a row.
template <int kParts>
struct Share {
  static constexpr int kMost = kParts * kPart;
  unsigned key[kParts][kPart];  // zero: none, or not to be chosen
  unsigned best[kParts];

  __device__ void drop_all() {
#pragma unroll
    for (int i = 0; i < kMost; ++i) key[i / kPart][i % kPart] = 0U;
  }
  __device__ void find_best() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) best[part] = top_of(part);
  }
  [[nodiscard]] __device__ unsigned top() const {
    unsigned most = best[0];
#pragma unroll
    for (int part = 1; part < kParts; ++part) most = max(most, best[part]);
    return most;
  }
  // The first place that has the largest key `most`, which is taken out.
  __device__ int take(unsigned most) {
    int taken = -1;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (taken >= 0 || best[part] != most) continue;
      int place = 0;
#pragma unroll
      for (int i = kPart - 1; i >= 0; --i) place = key[part][i] == most ? i : place;
#pragma unroll
      for (int i = 0; i < kPart; ++i) key[part][i] = i == place ? 0U : key[part][i];
      best[part] = top_of(part);
      taken = part * kPart + place;
    }
    return taken;
  }

 private:
  [[nodiscard]] __device__ unsigned top_of(int part) const {
    unsigned most = 0U;
#pragma unroll
    for (int i = 0; i < kPart; ++i) most = max(most, key[part][i]);
    return most;
  }
};

// Whether the lane's experts are of one of the best groups; `lanes` neighbours, a power of two, share a
// group, which has at least four experts.
template <int kParts>
__device__ bool in_best_groups(const RouterShape& shape, const Share<kParts>& share, int lanes) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  unsigned first = 0U, second = 0U;
#pragma unroll
  for (int i = 0; i < Share<kParts>::kMost; ++i) {
    const unsigned key = share.key[i / kPart][i % kPart];
    second = max(second, min(first, key));
    first = max(first, key);
  }
  for (int offset = 1; offset < lanes; offset *= 2) {
    const unsigned other = __shfl_xor_sync(kFullWarp, first, offset);
    second = max(max(second, __shfl_xor_sync(kFullWarp, second, offset)), min(first, other));
    first = max(first, other);
  }
  const unsigned own = order_key(fmaxf(value_of_key(first) + value_of_key(second), -FLT_MAX));
  int better = 0;
  for (int other = 0; other < kWarp; other += lanes) {
    const unsigned key = __shfl_sync(kFullWarp, own, other);
    better += static_cast<int>(key > own || (key == own && other / lanes < lane / lanes));
  }
  return better < static_cast<int>(shape.top_groups);
}

// What is chosen by, to two units in the last place; weights are made by share_of.
template <RouterScore kScore>
__device__ float fast_share(float logit, const ScoreBase& base) {
  if constexpr (kScore == RouterScore::kSigmoid) return __fdividef(1.0F, 1.0F + expf(-logit));
  return __fdividef(expf(logit - base.top), base.total);
}

template <int kParts, RouterScore kScore>
__global__ void __launch_bounds__(kThreads) route_in_registers(Router op) {
  const RouterShape& shape = op.shape;
  const std::int64_t token = std::int64_t{blockIdx.x} * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= shape.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int experts = static_cast<int>(shape.experts), top_k = static_cast<int>(shape.top_k);
  const int each = experts / kWarp;
  const float* logits = op.logits + token * experts;
  const float* own = logits + lane * each;
  const float* bias = op.bias == nullptr ? nullptr : op.bias + lane * each;
  const ScoreBase base = score_base(kScore, false, experts, [=](int e) { return logits[e]; });
  float logit[Share<kParts>::kMost / 4][4];
#pragma unroll
  for (int i = 0; i < Share<kParts>::kMost / 4; ++i) load_shared_row(own + min(4 * i, each - 4), logit[i]);
  Share<kParts> share;
#pragma unroll
  for (int i = 0; i < Share<kParts>::kMost / 4; ++i) {
    float shift[4] = {};
    if (bias != nullptr) load_shared_row(bias + min(4 * i, each - 4), shift);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      // A NaN is the last choice, and still one: its weight is NaN and is seen.
      const unsigned key = order_key(fmaxf(fast_share<kScore>(logit[i][n], base) + shift[n], -FLT_MAX));
      share.key[i / 2][i % 2 * 4 + n] = 4 * i < each ? key : 0U;
    }
  }
  if (shape.top_groups < shape.groups) {
    const int lanes = kWarp / static_cast<int>(shape.groups);
    if (!in_best_groups(shape, share, lanes)) share.drop_all();
  }
  share.find_best();
  int chosen = 0;  // lane j: the j-th
  for (int j = 0; j < top_k; ++j) {
    const unsigned top = share.top(), most = warp_max_of(top);
    const int owner = __ffs(static_cast<int>(__ballot_sync(kFullWarp, top == most))) - 1;
    int place = 0;
    if (lane == owner) place = share.take(most);
    place = __shfl_sync(kFullWarp, place, owner);
    if (lane == j) chosen = owner * each + place;
  }
  const float taken = logits[chosen];
  const ScoreBase whole = shape.renormalise == Renormalise::kYes
                              ? score_base(kScore, true, top_k, [=](int) { return taken; })
                              : base;
  if (lane >= top_k) return;
  op.expert[token * top_k + lane] = chosen;
  op.weight[token * top_k + lane] = share_of(kScore, taken, whole) * shape.scaling;
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

// False: the shape is not for registers.
bool launch_in_registers(OpCall& call, const Router& op) {
  const RouterShape& shape = op.shape;
  const bool whole_groups = shape.top_groups == shape.groups || kWarp % shape.groups == 0;
  if (shape.experts % (4 * kWarp) != 0 || shape.top_k > kWarp || !whole_groups) return false;
  if (!aligned(op.logits) || !aligned(op.bias)) return false;
  const Grid grid{.x = ceil_div(shape.tokens, kTokensPerBlock), .threads = kThreads};
  const auto take = [&](auto parts) {
    constexpr int kParts = decltype(parts)::value;
    const auto kernel = shape.score == RouterScore::kSigmoid
                            ? route_in_registers<kParts, RouterScore::kSigmoid>
                            : route_in_registers<kParts, RouterScore::kSoftmax>;
    call.launch(kernel, grid, op);
    return true;
  };
  if (shape.experts <= kWarp * Share<1>::kMost) return take(std::integral_constant<int, 1>{});
  if (shape.experts <= kWarp * Share<2>::kMost) return take(std::integral_constant<int, 2>{});
  if (shape.experts <= kWarp * Share<4>::kMost) return take(std::integral_constant<int, 4>{});
  return false;
}

}  // namespace

void launch(OpCall& call, const Router& op) {
  const RouterShape& shape = op.shape;
  call.set_shape({shape.tokens, shape.experts, shape.top_k, shape.groups, shape.top_groups});
  call.require(shape.groups >= 1 && shape.experts % shape.groups == 0, "groups must divide the experts");
  call.require(shape.top_groups >= 1 && shape.top_groups <= shape.groups, "top_groups must be 1 to groups");
  call.require(shape.top_k >= 1 && shape.top_k <= shape.top_groups * (shape.experts / shape.groups),
               "top_k is not 1 to the experts of the kept groups");
  if (launch_in_registers(call, op)) return;
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
