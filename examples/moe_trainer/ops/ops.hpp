// The trainer's operators, once as an interface; ops/cpu and ops/cuda implement it.
//
// All tensors are fp32, row-major, dense, on the device the Ops was made for; indices are int32. Shapes stand
// beside each pointer. Every call is asynchronous on `stream`: arguments are copied, pointers must stay valid
// in stream order. Results are deterministic: the same call with the same bits in gives the same bits out.
// Outputs named `d_*` are overwritten unless the field says "adds". Inputs are never written. A null optional
// pointer means: not given, or not wanted. Scratch memory comes from the ScratchSource given at construction
// and goes back in stream order. Errors are thrown as std::exception with one line of text: the trainer is a
// program, not a guest. Mathematics: docs/OPERATORS.md.
#pragma once

#include <cstdint>
#include <memory>

#include "runtime/device.hpp"

namespace terrace::trainer {

class ScratchSource {
 public:
  virtual ~ScratchSource() = default;
  // Device memory until the handle dies; reused afterwards in order of the compute stream. Throws when out of
  // budget.
  [[nodiscard]] virtual std::shared_ptr<const void> take(Bytes size, Address* address) = 0;
};

enum class Accumulate : std::uint8_t { kOverwrite, kAdd };
enum class Transpose : std::uint8_t { kNo, kYes };

// C (m, n) = op(A) op(B) [+ C]. op(A) is (m, k), op(B) is (k, n); stored transposed where the flag says so.
struct Matmul {
  std::int64_t m, n, k;
  const float* a;
  Transpose ta;
  const float* b;
  Transpose tb;
  float* c;
  Accumulate into = Accumulate::kOverwrite;
};

// Rows of expert e are offsets[e] .. offsets[e + 1) of a (rows, k) matrix; offsets live on the device and
// their last is at most `rows`. Rows past the last offset are neither read nor written.
struct GroupedMatmul {  // forward: c_r = w_e a_r ; input gradient: a_r = w_e^T c_r
  std::int64_t groups, rows, n, k;
  const std::int32_t* offsets;  // (groups + 1)
  const float* a;               // forward: (rows, k); input gradient: (rows, n)
  const float* w;               // (groups, n, k)
  float* c;                     // forward: (rows, n); input gradient: (rows, k)
  Accumulate into = Accumulate::kOverwrite;
};
struct GroupedWeightGradient {  // d_w_e (n, k) [+]= sum over rows r of e: d_c_r a_r^T ; zero for an empty
                                // expert
  std::int64_t groups, rows, n, k;
  const std::int32_t* offsets;
  const float* d_c;  // (rows, n)
  const float* a;    // (rows, k)
  float* d_w;
  Accumulate into = Accumulate::kOverwrite;
};

// y = x / rms(x) * w over the last dimension, rms(x) = sqrt(mean x^2 + eps).
struct RmsNorm {
  std::int64_t rows, width;
  float eps;
  const float* x;
  const float* w;
  float* y;
};
struct RmsNormBackward {
  std::int64_t rows, width;
  float eps;
  const float* x;
  const float* w;
  const float* d_y;
  float* d_x;
  Accumulate into_d_x = Accumulate::kOverwrite;
  float* d_w;  // (width), adds
};
// The KDA output gate: y = rmsnorm(o) * w * sigmoid(gate), norm over each head's `width`.
struct GatedRmsNorm {
  std::int64_t rows, width;
  float eps;  // rows = tokens * heads
  const float* o;
  const float* w;
  const float* gate;  // (rows, width), (width), (rows, width)
  float* y;
};
struct GatedRmsNormBackward {
  std::int64_t rows, width;
  float eps;
  const float* o;
  const float* w;
  const float* gate;
  const float* d_y;
  float* d_o;
  float* d_gate;
  float* d_w;  // adds
};
// y = (x - mean) * rsqrt(var + eps) * w + b.
struct LayerNorm {
  std::int64_t rows, width;
  float eps;
  const float* x;
  const float* w;
  const float* b;
  float* y;
};
struct LayerNormBackward {
  std::int64_t rows, width;
  float eps;
  const float* x;
  const float* w;
  const float* d_y;
  float* d_x;
  Accumulate into_d_x = Accumulate::kOverwrite;
  float* d_w;
  float* d_b;  // add
};

// y = silu(conv(x)), depthwise, causal, no bias: y[t] = silu(sum_j w[j] x[t - taps + 1 + j]), zero before the
// start.
struct CausalConv {
  std::int64_t batch, length, channels, taps;
  const float* x;
  const float* w;
  float* y;
};  // (B,T,C), (C,taps)
struct CausalConvBackward {
  std::int64_t batch, length, channels, taps;
  const float* x;
  const float* w;
  const float* d_y;
  float* d_x;
  float* d_w;  // (C, taps), adds
};

// Gated delta rule with a decay per channel; l2norm of q and k, the gate and sigmoid(beta) are part of it.
enum class KdaGate : std::uint8_t { kSoftplus, kLowerBound };
struct KdaShape {
  std::int64_t batch, length, key_heads, value_heads, key_width,
      value_width;  // B, T, H, HV, K, V; H divides HV
  KdaGate gate = KdaGate::kLowerBound;
  float lower_bound = -5.0F, l2_eps = 1e-6F, scale = 0;  // scale: K^-1/2 where 0
};
struct KdaInputs {
  const float* q;
  const float* k;                        // (B, T, H, K), before l2norm
  const float* v;                        // (B, T, HV, V)
  const float* gate;                     // z (B, T, HV, K)
  const float* beta;                     // (B, T, HV), before sigmoid
  const float* a_log;                    // A (HV)
  const float* dt_bias;                  // (HV, K)
  const float* initial_state = nullptr;  // (B, HV, K, V)
};
struct Kda {
  KdaShape shape;
  KdaInputs in;
  float* o;
  float* final_state = nullptr;
};  // o (B, T, HV, V)
struct KdaBackward {
  KdaShape shape;
  KdaInputs in;
  const float* d_o;
  const float* d_final_state = nullptr;
  float* d_q;
  float* d_k;
  float* d_v;
  float* d_gate;
  float* d_beta;
  float* d_a_log;
  float* d_dt_bias;  // add
  float* d_initial_state = nullptr;
};

// Sparse attention: one key and one value row a token, shared by all heads (the MLA form), over the top-k
// causal positions that the indexer chose; optional sink; y = attention * sigmoid(gate).
struct DsaShape {
  std::int64_t batch, length, heads, key_width, value_width, index_heads, index_width,
      top_k;        // B T H DK DV HI DI k
  float scale = 0;  // DK^-1/2 where 0
  std::int64_t slots() const { return top_k < length ? top_k : length; }
};
struct DsaInputs {
  const float* q;        // (B, T, H, DK)
  const float* k;        // (B, T, DK)
  const float* v;        // (B, T, DV)
  const float* gate;     // (B, T, H, DV); null: no gate
  const float* sink;     // (H); null: no sink
  const float* index_q;  // (B, T, HI, DI)
  const float* index_k;  // (B, T, DI)
  const float* index_w;  // (B, T, HI)
};
// Chooses the positions: selected (B, T, slots), ascending, padded with -1. Ties go to the lower position.
// scores (B, T, T), where given, gets the indexer's scores, -inf for positions in the future.
struct DsaSelect {
  DsaShape shape;
  DsaInputs in;
  std::int32_t* selected;
  float* scores = nullptr;
};
struct Dsa {
  DsaShape shape;
  DsaInputs in;
  const std::int32_t* selected;
  float* y;  // (B, T, H, DV)
};
struct DsaBackward {
  DsaShape shape;
  DsaInputs in;
  const std::int32_t* selected;
  const float* d_y;
  float* d_q;
  float* d_k;
  float* d_v;
  float* d_gate;
  float* d_sink;  // (H), adds
  // Gradient of index_loss_weight * sum over tokens of KL(p || softmax(I) on the selected).
  float index_loss_weight = 0;
  float* d_index_q;
  float* d_index_k;
  float* d_index_w;
  float* index_loss = nullptr;  // (1): the unweighted sum
};

// scores = sigmoid(logits); selection on scores + bias with a group limit; weights = scores of the selected,
// renormalised to one, times `scaling`.
struct RouterShape {
  std::int64_t tokens, experts, top_k, groups, top_groups;
  float scaling;
};
struct Router {
  RouterShape shape;
  const float* logits;
  const float* bias;  // (T, E), (E)
  std::int32_t* expert;
  float* weight;  // (T, k): chosen in descending scores + bias, and their weights
};
struct RouterBackward {  // replays `expert`, never selects again
  RouterShape shape;
  const float* logits;
  const std::int32_t* expert;
  const float* d_weight;
  float* d_logits;  // (T, E)
};
// Row map by counting: offsets (E + 1); row (T, k) is where slot (t, j) sits; source (T * k) is its inverse,
// t * k + j.
struct Permute {
  std::int64_t tokens, experts, top_k;
  const std::int32_t* expert;
  std::int32_t* offsets;
  std::int32_t* row;
  std::int32_t* source;
};
struct GatherRows {  // out_r = x[source_r / top_k]
  std::int64_t rows, width, top_k;
  const std::int32_t* source;
  const float* x;
  float* out;
};
struct SumRows {  // out_t [+]= sum over j of weight_tj * x[row_tj]; null weight: 1
  std::int64_t tokens, width, top_k;
  const std::int32_t* row;
  const float* weight;
  const float* x;
  float* out;
  Accumulate into = Accumulate::kOverwrite;
};
struct SumRowsBackward {  // d_x_row(t,j) = weight_tj d_out_t ; d_weight_tj = <d_out_t, x_row(t,j)>
  std::int64_t tokens, width, top_k;
  const std::int32_t* row;
  const float* weight;
  const float* x;
  const float* d_out;
  float* d_x;
  float* d_weight;
};
// SiTU-GLU: y = 4 tanh(g / 4) sigmoid(g) * 25 tanh(u / 25).
struct SituGlu {
  std::int64_t count;
  const float* g;
  const float* u;
  float* y;
};
struct SituGluBackward {
  std::int64_t count;
  const float* g;
  const float* u;
  const float* d_y;
  float* d_g;
  float* d_u;
  float* y = nullptr;  // the forward's output, made again on the way; may be d_y
};
// bias += gamma * sign(mean count - count of e), counts from offsets.
struct BalanceBias {
  std::int64_t experts;
  float gamma;
  const std::int32_t* offsets;
  float* bias;
};

struct Add {
  std::int64_t count;
  const float* a;
  const float* b;
  float* out;
};  // out may be a or b
struct Embedding {
  std::int64_t tokens, width, vocabulary;
  const std::int32_t* ids;
  const float* table;
  float* out;
};
struct EmbeddingBackward {
  std::int64_t tokens, width, vocabulary;
  const std::int32_t* ids;
  const float* d_out;
  float* d_table;
};  // adds

// loss_sum += sum over counted tokens of (lse - logit of the label); labels of -100 count for nothing.
// Gradients are of gradient_scale * (that sum): pass 1 / counted labels for the mean. Chunked: logits never
// exist whole.
struct LinearCrossEntropy {
  std::int64_t tokens, width, vocabulary;
  const float* hidden;
  const float* weight;
  const std::int32_t* labels;  // (T, D), (V, D), (T)
  float gradient_scale;
  float* loss_sum;  // (1), adds
  float* d_hidden;  // (T, D); null: forward only
  float* d_weight;  // (V, D), adds; null: forward only
};

struct SumOfSquares {
  std::int64_t count;
  const float* x;
  float* out;
};  // out (1), adds
// Gradient clipping is part of it: g is scaled by min(1, clip_norm / sqrt(*sum_of_squares)); clip_norm 0:
// off.
struct AdamW {
  std::int64_t count;
  float* parameter;
  const float* gradient;
  float* m;
  float* v;
  float learning_rate, beta1, beta2, eps, weight_decay;
  std::int64_t step;  // step counts from 1
  const float* sum_of_squares;
  float clip_norm;
};

class Ops {
 public:
  virtual ~Ops() = default;
  // clang-format off
#define TERRACE_TRAINER_OPS(APPLY)                                                                  \
  APPLY(Matmul) APPLY(GroupedWeightGradient) APPLY(RmsNorm) APPLY(RmsNormBackward)                  \
  APPLY(GatedRmsNorm) APPLY(GatedRmsNormBackward) APPLY(LayerNorm) APPLY(LayerNormBackward)         \
  APPLY(CausalConv) APPLY(CausalConvBackward) APPLY(Kda) APPLY(KdaBackward)                         \
  APPLY(DsaSelect) APPLY(Dsa) APPLY(DsaBackward) APPLY(Router) APPLY(RouterBackward)                \
  APPLY(Permute) APPLY(GatherRows) APPLY(SumRows) APPLY(SumRowsBackward)                            \
  APPLY(SituGlu) APPLY(SituGluBackward) APPLY(BalanceBias) APPLY(Add)                               \
  APPLY(Embedding) APPLY(EmbeddingBackward) APPLY(LinearCrossEntropy) APPLY(SumOfSquares) APPLY(AdamW)
// clang-format on
#define TERRACE_DECLARE_OP(Op) virtual void run(Stream stream, const Op& op) = 0;
  TERRACE_TRAINER_OPS(TERRACE_DECLARE_OP)
#undef TERRACE_DECLARE_OP
  virtual void grouped_forward(Stream stream, const GroupedMatmul& op) = 0;
  virtual void grouped_input_gradient(Stream stream, const GroupedMatmul& op) = 0;
  // Sustained fp32 GEMM FLOP/s of this implementation at a (rows, width, width) product: the best of a few
  // runs.
  [[nodiscard]] virtual double gemm_flops_per_second(std::int64_t rows, std::int64_t width) = 0;
};

// Errors: kNotSupported where the device cannot run these.
[[nodiscard]] Result<std::unique_ptr<Ops>> make_cpu_ops(Device& device, ScratchSource& scratch);
[[nodiscard]] Result<std::unique_ptr<Ops>> make_cuda_ops(Device& device, ScratchSource& scratch);
// By the device's kind.
[[nodiscard]] Result<std::unique_ptr<Ops>> make_ops(Device& device, ScratchSource& scratch);

}  // namespace terrace::trainer
