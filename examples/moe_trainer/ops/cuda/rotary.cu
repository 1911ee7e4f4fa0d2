// Pair i of a token at position p: (a, b) -> factor (a cos t - b sin t, b cos t + a sin t), t = p f_i; the
// inverse turns by -t. f_i = theta^(-2 i / rotary width), or a table's. Angles are formed and reduced in
// double: once for a pair of a token, in shared memory; a block then turns all heads of a few tokens.   x, y:
// (B, T, heads, width)
#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cuda/conv_shape.cuh"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;

struct RotaryPlan {
  std::int64_t x_stride, y_stride;
  int tokens;         // of a block
  int pairs;          // of a head
  double log2_theta;  // over the rotary width, times 2
};

__device__ std::int64_t position_of(const Rotary& op, std::int64_t token) {
  if (op.positions != nullptr) return op.positions[token];
  return token - sequence_of(op.packing, op.length, token).start;
}

// (cos, sin) of the block's tokens and pairs, times the factor.
__device__ void fill_turns(const Rotary& op, const RotaryPlan& plan, std::int64_t first, float2* turns) {
  constexpr double kTurns = 0.1591549430918953358;  // in one radian
  for (int at = static_cast<int>(threadIdx.x); at < plan.tokens * plan.pairs; at += kThreads) {
    const std::int64_t token = first + at / plan.pairs;
    const int pair = at % plan.pairs;
    if (token >= op.batch * op.length) continue;
    const double frequency = op.frequency != nullptr ? static_cast<double>(op.frequency[pair])
                                                     : exp2(-plan.log2_theta * static_cast<double>(pair));
    const double whole = static_cast<double>(position_of(op, token)) * frequency * kTurns;
    float sine = 0.0F, cosine = 0.0F;
    sincospif(static_cast<float>(2.0 * (whole - rint(whole))), &sine, &cosine);
    if (op.direction == RotaryDirection::kInverse) sine = -sine;
    turns[at] = {cosine * op.factor, sine * op.factor};
  }
}

// kPairs pairs of a head, loaded together: halves are two packs, neighbours one.
template <typename T, RotaryLayout kLayout, int kPairs>
struct Pairs {
  float first[kPairs], second[kPairs];

  __device__ void load(const T* part, int pair, int pairs) {
    if constexpr (kPairs == 1) {
      first[0] = load_float(part + (kLayout == RotaryLayout::kHalf ? pair : 2 * pair));
      second[0] = load_float(part + (kLayout == RotaryLayout::kHalf ? pairs + pair : 2 * pair + 1));
    } else if constexpr (kLayout == RotaryLayout::kHalf) {
      unpack<T>(load_raw(part + pair), first);
      unpack<T>(load_raw(part + pairs + pair), second);
    } else {
      float both[2 * kPairs];
      unpack<T>(load_raw(part + 2 * pair), both);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        first[i] = both[2 * i];
        second[i] = both[2 * i + 1];
      }
    }
  }
  __device__ void store(T* part, int pair, int pairs) const {
    if constexpr (kPairs == 1) {
      store_float(part + (kLayout == RotaryLayout::kHalf ? pair : 2 * pair), first[0]);
      store_float(part + (kLayout == RotaryLayout::kHalf ? pairs + pair : 2 * pair + 1), second[0]);
    } else if constexpr (kLayout == RotaryLayout::kHalf) {
      store_raw(part + pair, pack<T>(first));
      store_raw(part + pairs + pair, pack<T>(second));
    } else {
      float both[2 * kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        both[2 * i] = first[i];
        both[2 * i + 1] = second[i];
      }
      store_raw(part + 2 * pair, pack<T>(both));
    }
  }
};

// What does not turn, where y is elsewhere: kCount numbers at a time.
template <typename T, int kCount>
__device__ void copy_rest(const Rotary& op, const RotaryPlan& plan, std::int64_t first, int tokens) {
  const auto before = static_cast<int>(op.offset / kCount);
  const auto turned = static_cast<int>(op.rotary_width / kCount);
  const int rest = static_cast<int>(op.width / kCount) - turned, heads = static_cast<int>(op.heads);
  const std::int64_t count = std::int64_t{tokens} * heads * rest;
  for (std::int64_t at = threadIdx.x; at < count; at += kThreads) {
    const auto index = static_cast<int>(at % rest);
    const std::int64_t token = first + at / rest / heads, head = at / rest % heads;
    const std::int64_t column = head * op.width + (index < before ? index : index + turned) * kCount;
    const T* from = op.x.as<T>() + token * plan.x_stride + column;
    T* to = op.y.as<T>() + token * plan.y_stride + column;
    if constexpr (kCount == 1) {
      *to = *from;
    } else {
      store_raw(to, load_raw(from));
    }
  }
}

template <typename T, RotaryLayout kLayout, int kPairs>
__global__ void __launch_bounds__(kThreads) turn(Rotary op, RotaryPlan plan) {
  extern __shared__ float2 turns[];
  const std::int64_t first = std::int64_t{blockIdx.x} * plan.tokens;
  const auto tokens =
      static_cast<int>(min(static_cast<std::int64_t>(plan.tokens), op.batch * op.length - first));
  fill_turns(op, plan, first, turns);
  __syncthreads();
  const int groups = plan.pairs / kPairs, heads = static_cast<int>(op.heads);
  const std::int64_t count = std::int64_t{tokens} * heads * groups;
  for (std::int64_t at = threadIdx.x; at < count; at += kThreads) {
    const int pair = static_cast<int>(at % groups) * kPairs;
    const auto token = static_cast<int>(at / groups / heads);
    const std::int64_t column = at / groups % heads * op.width + op.offset;
    Pairs<T, kLayout, kPairs> pairs;
    pairs.load(op.x.as<T>() + (first + token) * plan.x_stride + column, pair, plan.pairs);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 by = turns[token * plan.pairs + pair + i];
      const float a = pairs.first[i], b = pairs.second[i];
      pairs.first[i] = a * by.x - b * by.y;
      pairs.second[i] = b * by.x + a * by.y;
    }
    pairs.store(op.y.as<T>() + (first + token) * plan.y_stride + column, pair, plan.pairs);
  }
  if (op.x.at() == op.y.at()) return;
  copy_rest<T, (kPairs == 1 ? 1 : kPack<T>)>(op, plan, first, tokens);
}

template <typename T, RotaryLayout kLayout>
void launch_layout(OpCall& call, const Rotary& op, const RotaryPlan& plan) {
  constexpr int kPairs = kLayout == RotaryLayout::kHalf ? kPack<T> : kPack<T> / 2;
  const auto whole = [](std::int64_t n) { return n % kPack<T> == 0; };
  const bool sixteens = plan.pairs % kPairs == 0 && whole(op.offset) && whole(op.width) &&
                        whole(op.rotary_width) && whole(plan.x_stride) && whole(plan.y_stride) &&
                        aligned(op.x.at()) && aligned(op.y.at());
  const Grid grid{.x = ceil_div(op.batch * op.length, plan.tokens),
                  .threads = kThreads,
                  .shared_bytes = static_cast<std::size_t>(plan.tokens) * plan.pairs * sizeof(float2)};
  if (sixteens) {
    call.launch(turn<T, kLayout, kPairs>, grid, op, plan);
  } else {
    call.launch(turn<T, kLayout, 1>, grid, op, plan);
  }
}

}  // namespace

void launch(OpCall& call, const Rotary& op) {
  call.set_shape({op.batch, op.length, op.heads, op.width, op.rotary_width});
  call.require(op.x.dtype() == op.y.dtype(), "all arrays must have one type");
  call.require(op.rotary_width >= 0 && op.rotary_width % 2 == 0 && op.offset >= 0 &&
                   op.offset + op.rotary_width <= op.width && op.rotary_width <= 4096,
               "the part that turns must be even, lie inside the head and be at most 4096 wide");
  if (op.batch * op.length <= 0 || op.heads <= 0 || op.width <= 0) return;
  const std::int64_t row = op.heads * op.width, pairs = op.rotary_width / 2;
  const RotaryPlan plan{
      .x_stride = op.x_stride == 0 ? row : op.x_stride,
      .y_stride = op.y_stride == 0 ? row : op.y_stride,
      .tokens = static_cast<int>(std::clamp<std::int64_t>(kThreads / std::max<std::int64_t>(pairs, 1), 1, 8)),
      .pairs = static_cast<int>(pairs),
      .log2_theta = pairs == 0 ? 0.0 : std::log2(op.theta) * 2.0 / static_cast<double>(op.rotary_width)};
  with_element(op.x.dtype(), [&](auto element) {
    using T = decltype(element);
    if (op.layout == RotaryLayout::kHalf) {
      launch_layout<T, RotaryLayout::kHalf>(call, op, plan);
    } else {
      launch_layout<T, RotaryLayout::kInterleaved>(call, op, plan);
    }
  });
}

}  // namespace terrace::trainer::cuda
