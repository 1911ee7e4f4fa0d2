// What the forward and the backward pass of dense attention share: which keys a token reads, and blocks of
// rows of either type as fp32 in scratch.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "examples/moe_trainer/ops/attention.hpp"
#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/small_matmul.hpp"

namespace terrace::trainer::cpu {

inline constexpr std::int64_t kAttentionRows = 64;  // of a block of queries, and of one of keys

// Throws for shapes and types that make no sense.
void check_attention(const AttentionShape& shape, std::initializer_list<In> arrays);

[[nodiscard]] inline float attention_scale(const AttentionShape& shape) {
  return shape.scale != 0 ? shape.scale : 1.0F / std::sqrt(static_cast<float>(shape.key_width));
}

// Token t reads keys first[t] .. t; first never falls. Key s is read by tokens s .. last[s].
struct Reach {
  std::int32_t* first;
  std::int32_t* last;  // null where it is not asked for
};
void fill_reach(const AttentionShape& shape, const Reach& reach);

inline Vec load_floats(const float* p, std::int64_t count) { return load_part(p, count); }
inline Vec load_floats(const Bf16* p, std::int64_t count) {
  alignas(16) Bf16 part[kLanes] = {};
  if (count < kLanes) {
    std::copy_n(p, std::max<std::int64_t>(count, 0), part);
    p = part;
  }
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}
inline void store_floats(float* p, Vec v, std::int64_t count) { store_part(p, v, count); }
inline void store_floats(Bf16* p, Vec v, std::int64_t count) {
  for (std::int64_t i = 0; i < std::min(count, kLanes); ++i) p[i] = to_bf16(v[i]);
}

// One head's rows, from some token on.
template <typename T>
struct HeadRows {
  T* at;
  std::int64_t step, width;
};
template <typename T>
[[nodiscard]] HeadRows<T> head_rows(T* data, RowStride stride, std::int64_t width, std::int64_t token,
                                    std::int64_t head) {
  return {data + token * stride.token + head * stride.head, stride.token, width};
}

// to (kAttentionRows, padded) = factor times the first `rows` rows, zero around them.
template <typename T>
void pack_block(const HeadRows<const T>& from, std::int64_t rows, float factor, const cpu::Out& to) {
  for (std::int64_t i = 0; i < kAttentionRows; ++i) {
    float* row = to.at + i * to.row;
    for (std::int64_t c = 0; c < to.row; c += kLanes) {
      store(row + c, i < rows ? load_floats(from.at + i * from.step + c, from.width - c) * factor : zero());
    }
  }
}
// The first `rows` rows of `to` = factor times those of a block.
template <typename T>
void unpack_block(const Right& from, std::int64_t rows, float factor, const HeadRows<T>& to) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t c = 0; c < to.width; c += kLanes) {
      store_floats(to.at + i * to.step + c, load(from.at + i * from.row + c) * factor, to.width - c);
    }
  }
}

// Calls body with a null pointer to the element type.
template <typename Body>
void with_element(Dtype dtype, Body&& body) {
  if (dtype == Dtype::kF32) return body(static_cast<float*>(nullptr));
  body(static_cast<Bf16*>(nullptr));
}

}  // namespace terrace::trainer::cpu
