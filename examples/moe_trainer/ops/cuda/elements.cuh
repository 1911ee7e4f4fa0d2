// Numbers of either type as fp32, and many at a time: loads and stores of 16 bytes, or of four numbers.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "examples/moe_trainer/ops/array.hpp"
#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

// Calls body(T{}) with the element type, float or Bf16.
template <typename Body>
void with_element(Dtype dtype, Body&& body) {
  if (dtype == Dtype::kF32) return body(float{});
  body(Bf16{});
}

__device__ inline float load_float(const float* at) { return *at; }
__device__ inline float load_float(const Bf16* at) {
  return __uint_as_float(static_cast<unsigned>(at->bits) << 16);
}
__device__ inline void store_float(float* at, float value) { *at = value; }
__device__ inline void store_float(Bf16* at, float value) {
  at->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ inline float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000U); }
__device__ inline unsigned as_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  unsigned bits = 0;
  memcpy(&bits, &pair, sizeof bits);  // whole: halves would be taken apart and put together again
  return bits;
}

// 16 bytes: four fp32 numbers or eight bf16 ones.
template <typename T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));

__device__ inline uint4 load_raw(const void* at) { return *static_cast<const uint4*>(at); }
// For what is read once: it should not push other lines out of the caches.
__device__ inline uint4 stream_raw(const void* at) { return __ldcs(static_cast<const uint4*>(at)); }
__device__ inline void store_raw(void* at, uint4 raw) { *static_cast<uint4*>(at) = raw; }

template <typename T>
__device__ inline void unpack(const uint4& raw, float (&to)[kPack<T>]) {
  if constexpr (sizeof(T) == 4) {
    to[0] = __uint_as_float(raw.x);
    to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z);
    to[3] = __uint_as_float(raw.w);
  } else {
    const unsigned pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = low_half(pairs[i]);
      to[2 * i + 1] = high_half(pairs[i]);
    }
  }
}
template <typename T>
__device__ inline uint4 pack(const float (&from)[kPack<T>]) {
  if constexpr (sizeof(T) == 4) {
    return {__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
            __float_as_uint(from[3])};
  } else {
    return {as_pair(from[0], from[1]), as_pair(from[2], from[3]), as_pair(from[4], from[5]),
            as_pair(from[6], from[7])};
  }
}
// kPack numbers of an fp32 array that many rows share, 16-byte aligned.
template <int kCount>
__device__ inline void load_shared_row(const float* at, float (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(at + i);
    to[i] = four.x;
    to[i + 1] = four.y;
    to[i + 2] = four.z;
    to[i + 3] = four.w;
  }
}

// Four numbers, aligned to their size together.
__device__ inline float4 load_four(const float* at) { return __ldcs(reinterpret_cast<const float4*>(at)); }
__device__ inline float4 load_four(const Bf16* at) {
  const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(at));
  return {low_half(raw.x), high_half(raw.x), low_half(raw.y), high_half(raw.y)};
}
__device__ inline void store_four(float* at, float4 value) { *reinterpret_cast<float4*>(at) = value; }
__device__ inline void store_four(Bf16* at, float4 value) {
  *reinterpret_cast<uint2*>(at) = {as_pair(value.x, value.y), as_pair(value.z, value.w)};
}
// The type looked at where it is: all threads of a launch take the same way.
__device__ inline float4 load_four(In array, std::int64_t i) {
  return array.dtype() == Dtype::kF32 ? load_four(array.as<float>() + i) : load_four(array.as<Bf16>() + i);
}
__device__ inline float load_one(In array, std::int64_t i) {
  return array.dtype() == Dtype::kF32 ? load_float(array.as<float>() + i) : load_float(array.as<Bf16>() + i);
}
__device__ inline void store_four(Out array, std::int64_t i, float4 value) {
  if (array.dtype() == Dtype::kF32) return store_four(array.as<float>() + i, value);
  store_four(array.as<Bf16>() + i, value);
}
__device__ inline void store_one(Out array, std::int64_t i, float value) {
  if (array.dtype() == Dtype::kF32) return store_float(array.as<float>() + i, value);
  store_float(array.as<Bf16>() + i, value);
}

// 1 / (1 + e^-x) by the fast exponential and reciprocal, denormal numbers taken for zero: relative error
// below 4e-7 (1 + |x|).
__device__ inline float fast_sigmoid(float x) {
  float power = 0.0F, inverse = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634F));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0F + power));
  return inverse;
}

// Null, or a multiple of `bytes`.
[[nodiscard]] inline bool aligned(const void* at, std::uintptr_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
}
// Whether four of the array's numbers may be taken at a time.
[[nodiscard]] inline bool aligned_fours(In array) {
  return aligned(array.at(), static_cast<std::uintptr_t>(4 * bytes_of(array.dtype())));
}

}  // namespace terrace::trainer::cuda
