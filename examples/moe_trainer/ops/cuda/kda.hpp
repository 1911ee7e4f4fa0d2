// The general form of KDA, any width to 128, fp32, one step after another; bf16 arrays are widened for it.
// kda_chunked.hpp is the fast form. Here is what its kernels share: sizes, the prepared inputs, and the
// recurrence over time.
//
// State columns are independent of one another in the forward recurrence. A warp owns kColumnsPerWarp columns
// of one head's state [K, V]: lane l holds rows l, l + 32, ... in registers.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

inline constexpr int kColumnsPerWarp = 4;
inline constexpr std::int64_t kMaxKdaWidth = 128;  // of keys and of values

struct KdaSizes {
  std::int64_t batch, length, key_heads, value_heads, key_width, value_width;  // B T H HV K V
  float scale;
  std::int64_t sequences;
  const std::int32_t* starts;  // null: batch rows
};
// Throws where the shape is beyond what the kernels take.
[[nodiscard]] KdaSizes kda_sizes(OpCall& call, const KdaShape& shape);

// q, k after l2norm (B, T, H, K); g (B, T, HV, K), the logarithm of the decay; beta after sigmoid (B, T, HV).
struct KdaPrepared {
  const float* q;
  const float* k;
  const float* g;
  const float* beta;
};
[[nodiscard]] KdaPrepared prepare_kda(OpCall& call, const KdaShape& shape, const KdaInputs& in);

struct KdaScan {
  KdaSizes sizes;
  KdaPrepared in;
  const float* v;
  const float* initial_state;  // null: zero
  float* o;                    // null: not wanted
  float* final_state;          // null: not wanted
  // The state before every `chunk` steps, in the lanes' order (see kda_scan.cuh); null: not wanted.
  float* checkpoints;
  std::int64_t chunk, slots;       // slots: states kept for a head, see kda_state_slot
  std::int64_t first_head, heads;  // of the value heads; every sequence
};
void scan_kda(OpCall& call, const KdaScan& scan);

[[nodiscard]] constexpr std::int64_t kda_rows_per_lane(const KdaSizes& sizes) {
  return ceil_div(sizes.key_width, 32);
}
[[nodiscard]] constexpr std::int64_t kda_warps_per_head(const KdaSizes& sizes) {
  return ceil_div(sizes.value_width, kColumnsPerWarp);
}
// Floats of one head's state in the lanes' order.
[[nodiscard]] constexpr std::int64_t kda_state_floats(const KdaSizes& sizes) {
  return kda_warps_per_head(sizes) * kda_rows_per_lane(sizes) * kColumnsPerWarp * 32;
}

}  // namespace terrace::trainer::cuda
