// KDA: gated delta rule with a decay per channel. Common rules: ops.hpp; mathematics: docs/OPERATORS.md.
//
// q, k, v, gate, beta, o and their gradients share one type, fp32 or bf16. The log decay, beta after its
// sigmoid, the residual v - S k and the state are fp32 in both. l2norm of q and k, the gate and sigmoid(beta)
// are part of the operator. Backward derives all it needs again from the inputs: nothing is kept for it.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

enum class KdaGate : std::uint8_t { kSoftplus, kLowerBound };
struct KdaShape {
  std::int64_t batch, length, key_heads, value_heads, key_width,
      value_width;  // B, T, H, HV, K, V; H divides HV
  KdaGate gate = KdaGate::kLowerBound;
  float lower_bound = -5.0F, l2_eps = 1e-6F, scale = 0;  // scale: K^-1/2 where 0
  Packing packing = {};  // with it B is 1, and states are (sequences, HV, K, V)
  [[nodiscard]] TERRACE_HOST_DEVICE constexpr std::int64_t sequences() const {
    return packing ? packing.sequences : batch;
  }
};
struct KdaInputs {
  In q;
  In k;                                  // (B, T, H, K), before l2norm
  In v;                                  // (B, T, HV, V)
  In gate;                               // z (B, T, HV, K)
  In beta;                               // (B, T, HV), before sigmoid
  const float* a_log;                    // A (HV)
  const float* dt_bias;                  // (HV, K)
  const float* initial_state = nullptr;  // (B or sequences, HV, K, V)
};
struct Kda {
  KdaShape shape;
  KdaInputs in;
  Out o;                         // (B, T, HV, V)
  float* final_state = nullptr;  // of a sequence without tokens: its initial state
};
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

// visit(array, how many numbers) for each activation.
template <typename F>
void visit_kda_inputs(const KdaShape& s, KdaInputs& in, F&& visit) {
  const std::int64_t tokens = s.batch * s.length;
  visit(in.q, tokens * s.key_heads * s.key_width);
  visit(in.k, tokens * s.key_heads * s.key_width);
  visit(in.v, tokens * s.value_heads * s.value_width);
  visit(in.gate, tokens * s.value_heads * s.key_width);
  visit(in.beta, tokens * s.value_heads);
}
template <typename F>
void visit_arrays(Kda& op, F&& visit) {
  visit_kda_inputs(op.shape, op.in, visit);
  visit(op.o, op.shape.batch * op.shape.length * op.shape.value_heads * op.shape.value_width);
}
template <typename F>
void visit_arrays(KdaBackward& op, F&& visit) {
  const KdaShape& s = op.shape;
  const std::int64_t tokens = s.batch * s.length;
  visit_kda_inputs(s, op.in, visit);
  visit(op.d_o, tokens * s.value_heads * s.value_width);
  visit(op.d_q, tokens * s.key_heads * s.key_width);
  visit(op.d_k, tokens * s.key_heads * s.key_width);
  visit(op.d_v, tokens * s.value_heads * s.value_width);
  visit(op.d_gate, tokens * s.value_heads * s.key_width);
  visit(op.d_beta, tokens * s.value_heads);
}

}  // namespace terrace::trainer
