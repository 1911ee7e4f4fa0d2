// DSA: indexer, top-k, attention over the chosen tokens. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// Sparse attention: one key and one value row a token, shared by all heads (the MLA form), over the top-k
// causal positions that the indexer chose; optional sink; y = attention * sigmoid(gate).
struct DsaShape {
  std::int64_t batch, length, heads, key_width, value_width, index_heads, index_width,
      top_k;        // B T H DK DV HI DI k
  float scale = 0;  // DK^-1/2 where 0
  std::int64_t slots() const { return top_k < length ? top_k : length; }
};
struct DsaInputs {
  In q;        // (B, T, H, DK)
  In k;        // (B, T, DK)
  In v;        // (B, T, DV)
  In gate;     // (B, T, H, DV); null: no gate
  const float* sink;     // (H); null: no sink
  In index_q;  // (B, T, HI, DI)
  In index_k;  // (B, T, DI)
  In index_w;  // (B, T, HI)
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
  Out y;  // (B, T, H, DV)
};
struct DsaBackward {
  DsaShape shape;
  DsaInputs in;
  const std::int32_t* selected;
  In d_y;
  Out d_q;
  Out d_k;
  Out d_v;
  Out d_gate;
  float* d_sink;  // (H), adds
  // Gradient of index_loss_weight * sum over tokens of KL(p || softmax(I) on the selected).
  float index_loss_weight = 0;
  Out d_index_q;
  Out d_index_k;
  Out d_index_w;
  float* index_loss = nullptr;  // (1): the unweighted sum
};

}  // namespace terrace::trainer
