// Eight floats at a time, in gcc's vector types: what is written is the order in which it is added.
//
// Only sources of ops/cpu include this; they are compiled for AVX2 and FMA. Loads and stores need no
// alignment beyond a float's.
#pragma once

#include <cstdint>
#include <cstring>

namespace terrace::trainer::cpu {

inline constexpr std::int64_t kLanes = 8;

typedef float Vec __attribute__((vector_size(32)));
typedef std::int32_t IntVec __attribute__((vector_size(32)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x}; }
inline Vec zero() { return Vec{}; }

// The first `count` (0 to 8) lanes; the others are zero and their memory is not touched.
inline Vec load_part(const float* p, std::int64_t count) {
  if (count >= kLanes) return load(p);
  Vec v{};
  if (count > 0) std::memcpy(&v, p, static_cast<std::size_t>(count) * sizeof(float));
  return v;
}
inline void store_part(float* p, Vec v, std::int64_t count) {
  if (count >= kLanes) return store(p, v);
  if (count > 0) std::memcpy(p, &v, static_cast<std::size_t>(count) * sizeof(float));
}

inline float sum(Vec v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
inline float largest(Vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

inline constexpr std::int64_t round_up_to(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Sum of a_i b_i in four independent lanes of eight.
inline float dot(const float* a, const float* b, std::int64_t n) {
  Vec s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + 8) * load(b + i + 8);
    s2 += load(a + i + 16) * load(b + i + 16);
    s3 += load(a + i + 24) * load(b + i + 24);
  }
  for (; i < n; i += kLanes) s0 += load_part(a + i, n - i) * load_part(b + i, n - i);
  return sum((s0 + s1) + (s2 + s3));
}
// y += alpha x.
inline void axpy(float alpha, const float* x, float* y, std::int64_t n) {
  const Vec a = splat(alpha);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, load(y + i) + a * load(x + i));
  if (i < n) store_part(y + i, load_part(y + i, n - i) + a * load_part(x + i, n - i), n - i);
}

}  // namespace terrace::trainer::cpu
