// Dense causal attention, exact: multi-head, grouped-query, or MLA with its keys expanded. Common rules:
// ops.hpp.
//
//   a_ts = scale <q_t, k_s>                      s in the reach of t
//   lse_t = log(sum_s e^a_ts + e^sink)           o_t = sum_s e^(a_ts - lse_t) v_s
//
// The reach of token t is itself and what lies before it in its own sequence, at most `window` tokens in all.
// Query head h reads key head h / (H / HK). Errors: std::runtime_error for a shape that wrong_with() names
// and for arrays of different types.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// Numbers from one token's row, and from one head's row, to the next; 0: dense. So q, k and v may be slices
// of a fused projection. Gradients lie as what they are the gradients of, and what is between their rows is
// not written.
struct RowStride {
  std::int64_t token = 0, head = 0;
};

struct AttentionShape {
  // B T H HK DK DV; HK divides H; widths are at most 256.
  std::int64_t batch, length, heads, key_heads, key_width, value_width;
  float scale = 0;          // DK^-1/2 where 0
  std::int64_t window = 0;  // 0: no limit
  Packing packing = {};     // batch 1
  RowStride q_stride = {}, k_stride = {}, v_stride = {};

  [[nodiscard]] constexpr RowStride q_rows() const { return dense(q_stride, heads, key_width); }
  [[nodiscard]] constexpr RowStride k_rows() const { return dense(k_stride, key_heads, key_width); }
  [[nodiscard]] constexpr RowStride v_rows() const { return dense(v_stride, key_heads, value_width); }
  [[nodiscard]] constexpr RowStride o_rows() const { return dense({}, heads, value_width); }
  [[nodiscard]] constexpr std::int64_t group() const { return heads / key_heads; }

 private:
  [[nodiscard]] static constexpr RowStride dense(RowStride given, std::int64_t rows, std::int64_t width) {
    const std::int64_t head = given.head != 0 ? given.head : width;
    return {given.token != 0 ? given.token : rows * head, head};
  }
};

struct Attention {
  AttentionShape shape;
  In q;                  // (B, T, H, DK)
  In k;                  // (B, T, HK, DK)
  In v;                  // (B, T, HK, DV)
  const float* sink;     // (H); null: no sink
  Out o;                 // (B, T, H, DV), dense
  float* lse = nullptr;  // (B, T, H)
};
struct AttentionBackward {
  AttentionShape shape;
  In q, k, v;
  const float* sink;
  In o;                     // as the forward pass gave it, and
  const float* lse;         // its logarithms
  In d_o;                   // (B, T, H, DV), dense
  Out d_q;                  // as q
  Out d_k;                  // as k
  Out d_v;                  // as v
  float* d_sink = nullptr;  // (H), adds
};

inline constexpr std::int64_t kMaxAttentionWidth = 256;

// What an implementation would refuse, or null.
[[nodiscard]] constexpr const char* wrong_with(const AttentionShape& s) {
  constexpr std::int64_t kMaxLength = 0x7fffff00;
  if (s.batch < 0 || s.length < 0 || s.heads < 1 || s.key_heads < 1)
    return "attention: an extent is negative";
  if (s.length > kMaxLength) return "attention: a sequence is longer than 32 bits count";
  if (s.heads % s.key_heads != 0) return "attention: the key heads must divide the heads";
  if (s.key_width < 1 || s.key_width > kMaxAttentionWidth || s.value_width < 1 ||
      s.value_width > kMaxAttentionWidth) {
    return "attention: widths must be 1 to 256";
  }
  if (s.window < 0) return "attention: the window is negative";
  if (s.packing && s.batch != 1) return "attention: packed sequences have batch 1";
  return nullptr;
}

}  // namespace terrace::trainer
