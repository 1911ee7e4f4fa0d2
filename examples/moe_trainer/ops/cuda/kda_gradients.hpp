// From the recurrence's gradients, one set a value head, to those of the operator's inputs.
#pragma once

#include "examples/moe_trainer/ops/cuda/kda.hpp"

namespace terrace::trainer::cuda {

// Of the prepared inputs, before the sum over the value heads of a key head.
struct KdaHeadGradients {
  float* d_q;     // (B, T, HV, K)
  float* d_k;     // (B, T, HV, K)
  float* d_g;     // (B, T, HV, K)
  float* d_beta;  // (B, T, HV)
};
// Places for them: the operator's own outputs where the shapes agree, scratch where not.
[[nodiscard]] KdaHeadGradients kda_head_gradients(OpCall& call, const KdaBackward& op);

// Chains them through l2norm, the gate and sigmoid(beta) into op's outputs.
void finish_kda_gradients(OpCall& call, const KdaBackward& op, const KdaPrepared& prepared,
                          const KdaHeadGradients& gradients);

// Sums over chunks or slices of the gate's parameters' gradients: each (count, HV, K).
struct KdaGateParts {
  const float* d_dt;
  const float* d_a;
  std::int64_t count;
};
// Adds them to op.d_dt_bias and, over K, to op.d_a_log.
void add_gate_sums(OpCall& call, const KdaBackward& op, const KdaGateParts& parts);

}  // namespace terrace::trainer::cuda
