// Mixture of experts: routing, permutation, activation, balancing. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/linear.hpp"

namespace terrace::trainer {

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
  In x;
  Out out;
};
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
  In x;
  In d_out;
  Out d_x;
  float* d_weight;
};
// SiTU-GLU: y = 4 tanh(g / 4) sigmoid(g) * 25 tanh(u / 25).
struct SituGlu {
  std::int64_t count;
  In g;
  In u;
  Out y;
};
struct SituGluBackward {
  std::int64_t count;
  In g;
  In u;
  In d_y;
  Out d_g;
  Out d_u;
  Out y = nullptr;  // the forward's output, made again on the way; may be d_y
};
// bias += gamma * sign(mean count - count of e), counts from offsets.
struct BalanceBias {
  std::int64_t experts;
  float gamma;
  const std::int32_t* offsets;
  float* bias;
};

}  // namespace terrace::trainer
