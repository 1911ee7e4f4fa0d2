// KDA: gated delta rule with a decay per channel. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// Gated delta rule with a decay per channel; l2norm of q and k, the gate and sigmoid(beta) are part of it.
enum class KdaGate : std::uint8_t { kSoftplus, kLowerBound };
struct KdaShape {
  std::int64_t batch, length, key_heads, value_heads, key_width,
      value_width;  // B, T, H, HV, K, V; H divides HV
  KdaGate gate = KdaGate::kLowerBound;
  float lower_bound = -5.0F, l2_eps = 1e-6F, scale = 0;  // scale: K^-1/2 where 0
};
struct KdaInputs {
  In q;
  In k;                        // (B, T, H, K), before l2norm
  In v;                        // (B, T, HV, V)
  In gate;                     // z (B, T, HV, K)
  In beta;                     // (B, T, HV), before sigmoid
  const float* a_log;                    // A (HV)
  const float* dt_bias;                  // (HV, K)
  const float* initial_state = nullptr;  // (B, HV, K, V)
};
struct Kda {
  KdaShape shape;
  KdaInputs in;
  Out o;
  float* final_state = nullptr;
};  // o (B, T, HV, V)
struct KdaBackward {
  KdaShape shape;
  KdaInputs in;
  In d_o;
  const float* d_final_state = nullptr;
  Out d_q;
  Out d_k;
  Out d_v;
  Out d_gate;
  Out d_beta;
  float* d_a_log;
  float* d_dt_bias;  // add
  float* d_initial_state = nullptr;
};

}  // namespace terrace::trainer
