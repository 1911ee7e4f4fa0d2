// Mixture of experts: routing, permutation, activation, balancing. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/linear.hpp"

namespace terrace::trainer {

// scores = sigmoid(logits), or softmax(logits) over all experts. The top_k of scores + bias are selected,
// inside the top_groups groups whose two best scores + bias sum highest (a group of one counts its only one);
// ties go to the lower group and expert. Weights are the bare scores of the selected, divided by their sum
// where `renormalise` says so (a sum of zero gives zeros), times `scaling`. A NaN is selected last.
enum class RouterScore : std::uint8_t { kSigmoid, kSoftmax };
enum class Renormalise : std::uint8_t { kYes, kNo };
struct RouterShape {
  std::int64_t tokens, experts, top_k, groups, top_groups;
  float scaling;
  RouterScore score = RouterScore::kSigmoid;
  Renormalise renormalise = Renormalise::kYes;
};
struct Router {
  RouterShape shape;
  const float* logits;
  const float* bias;  // (T, E), (E); null: zeros
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
// The balance loss of each sequence, from DeepSeek-V3: alpha * sum over experts of f_e P_e, where f_e is the
// share of the sequence's slots that chose e, times E, and P_e the sequence's mean of score_e / sum of
// scores. f is not differentiated. Sums over sequences: for their mean, divide alpha by how many there are.
struct SequenceLoss {
  std::int64_t tokens, experts, top_k;
  std::int64_t length;  // of every sequence, divides tokens; not looked at where there is a packing
  Packing packing;
  float alpha;
  RouterScore score;
  const float* logits;         // (T, E)
  const std::int32_t* expert;  // (T, k), as chosen; a negative one counts for nothing
  float* loss = nullptr;       // (1), adds; null: not wanted
  float* d_logits = nullptr;   // (T, E), adds; null: not wanted
};
// Rows for slots (t, j), grouped by expert, by counting: offsets (E + 1); row (T, k) is where slot (t, j)
// sits; source (T * k) is its inverse, t * k + j. Rows of an expert are in order of their slots. A slot
// without a row (its expert is negative, or it was dropped) has row -1; rows past the last offset have source
// -1.
//
// capacity: of the slots of one expert that many keep a row, those of highest weight, of equal ones the
// earlier. replicas: expert e has its weights in the places replicas[replica_starts[e]] .. [replica_starts[e
// + 1]), at least one, each place one expert's alone. Its kept slots are dealt out to them in turn. Offsets
// (places + 1) are then by place, and what follows (the grouped products) knows places only. Experts and
// places: at most kMostExperts.
struct Permute {
  static constexpr std::int64_t kMostExperts = 4096;
  std::int64_t tokens, experts, top_k;
  const std::int32_t* expert;
  std::int32_t* offsets;
  std::int32_t* row;
  std::int32_t* source;
  std::int64_t capacity = 0;                     // 0: all keep their row
  const float* weight = nullptr;                 // (T, k); read where there is a capacity
  std::int64_t places = 0;                       // 0: no replicas, expert e is place e
  const std::int32_t* replica_starts = nullptr;  // (E + 1)
  const std::int32_t* replicas = nullptr;        // (replica_starts[E])
  std::int32_t* counts = nullptr;  // (E): slots that chose e, dropped ones too; null: not wanted
};
struct GatherRows {  // out_r = x[source_r / top_k]; zeros where source_r is negative
  std::int64_t rows, width, top_k;
  const std::int32_t* source;
  In x;
  Out out;
};
// A row of -1 is a slot that was dropped: it adds nothing and has no gradient.
struct SumRows {  // out_t [+]= sum over j of weight_tj * x[row_tj]; null weight: 1
  std::int64_t tokens, width, top_k;
  const std::int32_t* row;
  const float* weight;
  In x;
  Out out;
  Accumulate into = Accumulate::kOverwrite;
};
struct SumRowsBackward {  // d_x_row(t,j) = weight_tj d_out_t ; d_weight_tj = <d_out_t, x_row(t,j)>
  std::int64_t tokens, width, top_k;
  const std::int32_t* row;
  const float* weight;
  In x;  // not read where d_weight is null
  In d_out;
  Out d_x;          // rows of no slot are not written
  float* d_weight;  // zero where dropped; null: not wanted
};
// A gated activation: kSitu: y = 4 tanh(g / 4) sigmoid(g) * 25 tanh(u / 25); kSwi: y = g sigmoid(g) * u.
enum class GluActivation : std::uint8_t { kSitu, kSwi };
// Row r of g starts at g + r * g_stride, and so on; y and d_y are dense. One array [g | u] of rows twice as
// wide, as public models store it, is g = base, u = base + width, both strides 2 width. All arrays are of one
// type.
struct Glu {
  std::int64_t rows, width;
  GluActivation activation;
  In g;
  std::int64_t g_stride;
  In u;
  std::int64_t u_stride;
  Out y;  // (rows, width)
};
struct GluBackward {
  std::int64_t rows, width;
  GluActivation activation;
  In g;
  std::int64_t g_stride;
  In u;
  std::int64_t u_stride;
  In d_y;   // (rows, width)
  Out d_g;  // may be g
  std::int64_t d_g_stride;
  Out d_u;  // may be u
  std::int64_t d_u_stride;
  Out y = nullptr;  // the forward's output, made again on the way; may be d_y
};
// The grouped product and its activation at once: gu_r = w_e a_r, y_r = activation(gate half, up half).
// Offsets and rows as in GroupedMatmul.
struct GroupedGlu {
  std::int64_t groups, rows, n, k;
  GluActivation activation;
  const std::int32_t* offsets;
  In a;              // (rows, k)
  In w;              // (groups, 2 n, k): n rows of the gate, then n of up
  Out y;             // (rows, n)
  Out gu = nullptr;  // (rows, 2 n), what GluBackward takes with stride 2 n
};
template <typename F>
void visit_arrays(GroupedGlu& op, F&& visit) {
  visit(op.a, op.rows * op.k);
  visit(op.w, op.groups * 2 * op.n * op.k);
  visit(op.y, op.rows * op.n);
  visit(op.gu, op.rows * 2 * op.n);
}
// bias += gamma * sign(mean count - count of e), counts as given, else from offsets.
struct BalanceBias {
  std::int64_t experts;
  float gamma;
  const std::int32_t* offsets;  // (E + 1)
  float* bias;
  const std::int32_t* counts = nullptr;  // (E)
};
// The bias that gives every expert its share, after what these tokens wanted: a token's cutoff is its (k +
// 1)-th best score + bias, an expert needs cutoff - score to be selected by it, and the new bias is the
// quantile k / E of what it needs over tokens (the ceil(k T / E)-th smallest), less the mean over experts.
// Groups are not looked at. top_k below experts; no tokens: the bias stays.
struct QuantileBias {
  std::int64_t tokens, experts, top_k;
  RouterScore score;
  const float* logits;  // (T, E)
  float* bias;          // (E), read and written
};

}  // namespace terrace::trainer
