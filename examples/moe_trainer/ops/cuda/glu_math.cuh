// The gated activations and their slopes, one number at a time. Formulas: docs/OPERATORS.md.
#pragma once

#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"
#include "examples/moe_trainer/ops/moe.hpp"

namespace terrace::trainer::cuda {

inline constexpr float kSituGateRange = 4.0F;
inline constexpr float kSituUpRange = 25.0F;

// kFast: a relative error below 1e-3, for results in bf16 (half a unit of the last place is 2e-3).
enum class GluMath : std::uint8_t { kExact, kFast };

template <GluMath kMath>
__device__ inline float glu_sigmoid(float x) {
  return kMath == GluMath::kFast ? fast_sigmoid(x) : sigmoid(x);
}
template <GluMath kMath>
__device__ inline float glu_tanh(float x) {
  if constexpr (kMath == GluMath::kExact) return tanhf(x);
  float y = 0;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct GluFactors {  // y = gate * up, and the slopes of each
  float gate, up, gate_slope, up_slope;
};

template <GluActivation kActivation, GluMath kMath>
__device__ inline GluFactors glu_factors(float g, float u) {
  const float s = glu_sigmoid<kMath>(g);
  if constexpr (kActivation == GluActivation::kSwi) {
    return {g * s, u, s * (1.0F + g * (1.0F - s)), 1.0F};
  } else {
    const float a = glu_tanh<kMath>(g / kSituGateRange);
    const float b = glu_tanh<kMath>(u / kSituUpRange);
    return {kSituGateRange * a * s, kSituUpRange * b, s * ((1.0F - a * a) + kSituGateRange * a * (1.0F - s)),
            1.0F - b * b};
  }
}

}  // namespace terrace::trainer::cuda
