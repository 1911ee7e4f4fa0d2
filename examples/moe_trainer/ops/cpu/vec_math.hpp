// Elementary functions on eight floats: relative error below 3e-7 against the exact value, NaN in gives NaN
// out, infinities at the ends of the range as libm has them.
#pragma once

#include <immintrin.h>

#include <limits>

#include "examples/moe_trainer/ops/cpu/vec.hpp"

namespace terrace::trainer::cpu {

inline Vec bits_as_float(IntVec bits) { return (Vec)bits; }

// e^x by 2^n e^r, |r| <= ln 2 / 2. The scale is applied in two halves, so that results near both ends of the
// range (denormals too) come out right.
inline Vec exp(Vec x) {
  const Vec clamped = min(max(x, splat(-104.0F)), splat(89.0F));
  const Vec magic = splat(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = clamped * 1.44269504F + magic;
  const Vec n = shifted - magic;
  const Vec r = (clamped - n * 0.693145752F) - n * 1.42860677e-6F;
  Vec p = splat(1.0F / 5040.0F);
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const IntVec whole = __builtin_convertvector(n, IntVec);
  const IntVec half = whole >> 1;
  const IntVec low = (half + 127) << 23, high = (whole - half + 127) << 23;
  const Vec result = p * bits_as_float(low) * bits_as_float(high);
  return x == x ? result : x;
}

inline Vec sigmoid(Vec x) { return 1.0F / (1.0F + exp(-x)); }
inline Vec silu(Vec x) { return x * sigmoid(x); }

inline bool all_lanes(IntVec truth) { return _mm256_movemask_ps((__m256)truth) == 0xff; }

// Odd series below 0.6, where 1 - 2 / (e^2x + 1) would cancel. Activations scaled down are mostly there, all
// eight at once: then the other branch is not computed. A lane's result does not depend on its neighbours.
inline Vec tanh(Vec x) {
  const Vec z = x * x;
  Vec p = splat(-5.70498872745E-3F);
  p = p * z + 2.06390887954E-2F;
  p = p * z - 5.37397155531E-2F;
  p = p * z + 1.33314422036E-1F;
  p = p * z - 3.33332819422E-1F;
  const Vec near = x + x * (p * z);
  const Vec size = x < 0.0F ? -x : x;
  if (all_lanes(size < 0.6F)) return near;
  const Vec far = 1.0F - 2.0F / (exp(x + x) + 1.0F);
  return size < 0.6F ? near : far;
}

// 2 atanh(s) = log((1 + s) / (1 - s)) for |s| <= 1/3.
inline Vec log_ratio(Vec s) {
  const Vec z = s * s;
  Vec p = splat(2.0F / 17.0F);
  p = p * z + 2.0F / 15.0F;
  p = p * z + 2.0F / 13.0F;
  p = p * z + 2.0F / 11.0F;
  p = p * z + 2.0F / 9.0F;
  p = p * z + 2.0F / 7.0F;
  p = p * z + 2.0F / 5.0F;
  p = p * z + 2.0F / 3.0F;
  return 2.0F * s + s * (z * p);
}
// log(1 + e^x) = max(x, 0) + log1p(e^-|x|).
inline Vec softplus(Vec x) {
  const Vec y = exp(x < 0.0F ? x : -x);
  return max(x, zero()) + log_ratio(y / (2.0F + y));
}

// Natural logarithm of positive normal finite numbers; zero gives -infinity, below zero and NaN give NaN.
inline Vec log(Vec x) {
  const IntVec bits = (IntVec)x;
  // Exponent of x / sqrt(1/2), so that the mantissa lies in [sqrt(1/2), sqrt(2)).
  const IntVec shifted = bits - 0x3f3504f3;
  const IntVec exponent = shifted >> 23;
  const IntVec mantissa = bits - (exponent << 23);
  const Vec m = bits_as_float(mantissa);
  const Vec n = __builtin_convertvector(exponent, Vec);
  const Vec f = m - 1.0F;
  const Vec result = n * 0.693145752F + (log_ratio(f / (2.0F + f)) + n * 1.42860677e-6F);
  const Vec at_zero = splat(-std::numeric_limits<float>::infinity());
  const Vec below = splat(std::numeric_limits<float>::quiet_NaN());
  return x > 0.0F ? result : (x == 0.0F ? at_zero : below);
}

}  // namespace terrace::trainer::cpu
