// What the kernels of dense attention share, and the launchers of its two ways: any widths and either type in
// plain fp32 arithmetic, and bf16 of the usual widths on Hopper's matrix units.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/attention.hpp"
#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

inline constexpr float kLog2E = 1.44269504088896340736F;

struct AttentionSizes {
  std::int64_t batch, heads, key_heads, group;
  int length, key_width, value_width;  // T DK DV
  float scale, scale_log2;             // scale_log2 = scale log2 e: exponentials are powers of two
  RowStride q, k, v, o;
  // Token t reads keys first[t] .. t, key s is read by tokens s .. last[s]; null: from 0, up to T - 1. Both
  // (stored), what is past T reads nothing and is read by nothing new.
  const std::int32_t* first;
  const std::int32_t* last;
  std::int64_t stored;  // T rounded up to kAttentionPad: rows of first, last, and of a head's statistics
};
inline constexpr std::int64_t kAttentionPad = 128;

// Checks the shape and the types; fills first and last on the call's stream where the reach is limited.
[[nodiscard]] AttentionSizes attention_sizes(OpCall& call, const AttentionShape& shape,
                                             std::initializer_list<In> arrays);

// Of the backward pass, a row of `stored` numbers a batch and head. Past T: infinite, and zero.
struct AttentionStatistics {
  const float* lse_log2;  // lse log2 e
  const float* delta;     // <o, d_o>
};

void launch_general(OpCall& call, const Attention& op, const AttentionSizes& sizes);
void launch_general(OpCall& call, const AttentionBackward& op, const AttentionSizes& sizes,
                    const AttentionStatistics& statistics);

// False, with nothing done: not for this device, type, width or alignment.
[[nodiscard]] bool launch_hopper(OpCall& call, const Attention& op, const AttentionSizes& sizes);
[[nodiscard]] bool launch_hopper(OpCall& call, const AttentionBackward& op, const AttentionSizes& sizes,
                                 const AttentionStatistics& statistics);

}  // namespace terrace::trainer::cuda
