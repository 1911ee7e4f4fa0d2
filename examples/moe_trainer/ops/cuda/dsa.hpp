// What the sparse attention's kernels share. A token's index runs over the whole batch: b * T + t.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

inline constexpr int kDsaThreads = 128;
// Of what is kept a token; tokens go in as many turns as it takes.
inline constexpr std::int64_t kDsaScratchBytes = 64LL << 20;

struct DsaSizes {
  std::int64_t batch, length, heads, key_width, value_width, index_heads, index_width;  // B T H DK DV HI DI
  std::int64_t slots;
  float scale;        // of the attention's logits
  float index_scale;  // HI^-1/2 DI^-1/2
};
[[nodiscard]] DsaSizes dsa_sizes(OpCall& call, const DsaShape& shape);

// How many tokens fit kDsaScratchBytes at that many floats a token; at least one, at most all.
[[nodiscard]] std::int64_t dsa_tokens_per_turn(const DsaSizes& sizes, std::int64_t floats_per_token);

// Tokens first .. first + count, whose scratch starts at zero.
struct DsaTurn {
  std::int64_t first, count;
};

}  // namespace terrace::trainer::cuda
