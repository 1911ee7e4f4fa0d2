// Scores of one token's row of logits by one warp, and the order of floats as unsigned numbers.
#pragma once

#include <cfloat>
#include <cstdint>

#include "examples/moe_trainer/ops/cuda/reduce.cuh"
#include "examples/moe_trainer/ops/moe.hpp"

namespace terrace::trainer::cuda {

// Keys order as their floats do; 0 and -0 are equal, NaN is below everything, and all are above zero, which
// is free to mean "taken".
__device__ inline unsigned order_key(float value) {
  const unsigned bits = __float_as_uint(value + 0.0F);
  if (value != value) return 1U;
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
__device__ inline float value_of_key(unsigned key) {
  return __uint_as_float((key & 0x80000000U) != 0 ? key & 0x7fffffffU : ~key);
}

__device__ inline unsigned warp_max_of(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFullWarp, value);
#else
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = max(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
#endif
}

// Each lane owns the keys whose index is its own modulo the warp's size: none looks at another's.
class WarpSelection {
 public:
  __device__ WarpSelection(unsigned* keys, int count) : keys_(keys), count_(count) { find_own_best(); }
  // Takes the largest key, of equal ones the lowest, and returns its index; key() is what it was.
  __device__ int take() {
    key_ = warp_max_of(best_);
    const auto wanted = static_cast<unsigned>(best_ == key_ ? best_at_ : count_);
    const auto chosen = static_cast<int>(~warp_max_of(~wanted));  // the least
    if (chosen % kWarp == lane()) {
      keys_[chosen] = 0;
      find_own_best();
    }
    return chosen;
  }
  [[nodiscard]] __device__ unsigned key() const { return key_; }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ void find_own_best() {
    best_ = 0;
    best_at_ = count_;
    for (int i = lane(); i < count_; i += kWarp) {
      if (keys_[i] > best_) {
        best_ = keys_[i];
        best_at_ = i;
      }
    }
  }

  unsigned* keys_;
  int count_;
  unsigned best_, key_ = 0;
  int best_at_;
};

// How a logit becomes a share of its row: sigmoid(l) / total, or e^(l - top) / total.
struct ScoreBase {
  float top, total;
};
__device__ inline float share_of(RouterScore score, float logit, const ScoreBase& base) {
  const float value = score == RouterScore::kSoftmax ? expf(logit - base.top) : sigmoid(logit);
  return base.total == 0.0F ? 0.0F : value / base.total;
}
// The base of all `count` logits, logit(i) the i-th, for softmax, and with `sum_sigmoids` for sigmoid; else a
// score is the bare sigmoid. All lanes take part and get the same.
template <typename Logit>
__device__ ScoreBase score_base(RouterScore score, bool sum_sigmoids, int count, Logit logit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  ScoreBase base{0.0F, 1.0F};
  if (score == RouterScore::kSoftmax) {
    float top = -INFINITY;
    for (int i = lane; i < count; i += kWarp) top = fmaxf(top, logit(i));
    base.top = warp_max(top);
    float total = 0.0F;
    for (int i = lane; i < count; i += kWarp) total += expf(logit(i) - base.top);
    base.total = warp_sum(total);
  } else if (sum_sigmoids) {
    float total = 0.0F;
    for (int i = lane; i < count; i += kWarp) total += sigmoid(logit(i));
    base.total = warp_sum(total);
  }
  return base;
}

}  // namespace terrace::trainer::cuda
