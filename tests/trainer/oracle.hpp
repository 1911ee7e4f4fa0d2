// Every operator again as plain loops in float64, and what the tests need to compare with them.
//
// Forward functions follow ops.hpp line by line. Gradients of the small ones are taken numerically from the
// forward function; KDA (step by step, not in chunks) and sparse attention have their own, which are checked
// against numerical ones too.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer {

using Values = std::vector<double>;

// Pseudo-random values around zero with the given deviation, each exactly a float. The same seed, the same
// values.
[[nodiscard]] Values random_values(std::int64_t count, std::uint64_t seed, double deviation = 1.0);
// Whole numbers in [0, below).
[[nodiscard]] std::vector<std::int32_t> random_ints(std::int64_t count, std::uint64_t seed,
                                                    std::int32_t below);

// ||a - b|| / ||b||, or ||a|| where b is zero; infinite where a value is not finite or sizes differ.
[[nodiscard]] double relative_error(const Values& a, const Values& b);
[[nodiscard]] double inner(const Values& a, const Values& b);
// Central differences of f at x, one element at a time.
[[nodiscard]] Values numeric_gradient(const std::function<double(const Values&)>& f, Values x,
                                      double step = 1e-5);

namespace oracle {

[[nodiscard]] double sigmoid(double x);
[[nodiscard]] double softplus(double x);

struct MatmulShape {
  std::int64_t m, n, k;
  Transpose ta, tb;
};
[[nodiscard]] Values matmul(const MatmulShape& shape, const Values& a, const Values& b);
[[nodiscard]] Values rms_norm(const Values& x, const Values& w, double eps);
[[nodiscard]] Values gated_rms_norm(const Values& o, const Values& w, const Values& gate, double eps);
[[nodiscard]] Values layer_norm(const Values& x, const Values& w, const Values& b, double eps);
// x (B, T, C), w (C, taps).
struct ConvShape {
  std::int64_t batch, length, channels, taps;
};
[[nodiscard]] Values causal_conv(const ConvShape& shape, const Values& x, const Values& w);
[[nodiscard]] Values situ_glu(const Values& g, const Values& u);
// hidden (T, D), weight (V, D): the sum over counted tokens.
[[nodiscard]] double cross_entropy(const Values& hidden, const Values& weight,
                                   const std::vector<std::int32_t>& labels);

struct Routed {
  std::vector<std::int32_t> expert;
  Values weight;
};
[[nodiscard]] Values router_scores(RouterScore score, const Values& logits);  // of one token
[[nodiscard]] Routed route(const RouterShape& shape, const Values& logits, const Values& bias);
[[nodiscard]] Values routed_weights(const RouterShape& shape, const Values& logits,
                                    const std::vector<std::int32_t>& expert);
// Of sequences from starts[i] to starts[i + 1]; pointers of `op` are not looked at.
[[nodiscard]] double sequence_loss(const SequenceLoss& op, const std::vector<std::int32_t>& starts,
                                   const Values& logits, const std::vector<std::int32_t>& expert);
[[nodiscard]] Values quantile_bias(const QuantileBias& op, const Values& logits, const Values& bias);
struct Permuted {
  std::vector<std::int32_t> offsets, row, source, counts;
};
// No replicas: empty starts.
[[nodiscard]] Permuted permute(const Permute& op, const std::vector<std::int32_t>& expert,
                               const Values& weight, const std::vector<std::int32_t>& replica_starts,
                               const std::vector<std::int32_t>& replicas);

struct KdaValues {
  Values q, k, v, gate, beta, a_log, dt_bias, initial_state;  // no initial state: zeros
  std::vector<std::int32_t> starts = {};                      // of packed sequences; none: batch rows
};
struct KdaResult {
  Values o, final_state;
};
struct KdaGradients {
  Values q, k, v, gate, beta, a_log, dt_bias, initial_state;
};
[[nodiscard]] KdaResult kda(const KdaShape& shape, const KdaValues& in);
// No d_final_state: zeros.
[[nodiscard]] KdaGradients kda_backward(const KdaShape& shape, const KdaValues& in, const Values& d_o,
                                        const Values& d_final_state);

struct DsaValues {
  Values q, k, v, gate, sink, index_q, index_k, index_w;  // no gate, no sink, v in k: empty
  std::vector<std::int32_t> starts = {};  // of packed sequences; the shape's own are not looked at
};
struct DsaGradients {
  Values q, k, v, gate, sink, index_q, index_k, index_w;
  double index_loss = 0;
};
[[nodiscard]] Values dsa_scores(const DsaShape& shape, const DsaValues& in);  // (B, T, T), -inf in the future
[[nodiscard]] std::vector<std::int32_t> dsa_select(const DsaShape& shape, const Values& scores);
[[nodiscard]] Values dsa(const DsaShape& shape, const DsaValues& in,
                         const std::vector<std::int32_t>& selected);
struct DsaParts {
  Values o, lse;  // before the gate; (B, T, H)
};
[[nodiscard]] DsaParts dsa_parts(const DsaShape& shape, const DsaValues& in,
                                 const std::vector<std::int32_t>& selected);
// The unweighted sum of the indexer's loss.
[[nodiscard]] double dsa_index_loss(const DsaShape& shape, const DsaValues& in,
                                    const std::vector<std::int32_t>& selected, const DsaValues& target_from);
[[nodiscard]] DsaGradients dsa_backward(const DsaShape& shape, const DsaValues& in,
                                        const std::vector<std::int32_t>& selected, const Values& d_y,
                                        double index_loss_weight);

}  // namespace oracle
}  // namespace terrace::trainer
