// Numbers as 8-bit floats: blocks of 128 in a row, a scale of its own for each. Read by g++ and by nvcc, so
// that both devices make the same bytes.
//
// A code is e4m3: a sign, 4 bits of exponent (bias 7), 3 of mantissa. The two largest codes of each sign are
// infinity and NaN, which come back as they went; the largest number is 416. The scale is a power of two, the
// least that brings the block's largest number to 416 or below, from 2^-124 to 2^119: multiplying by it loses
// nothing, and what comes back is a bf16 number. Rounding is to nearest, to even codes between two. So a
// finite x of a block with scale s comes back off by
//   max(|x| / 16, s / 1024) at most, where |x| <= 1.625 x 2^127; larger ones come back as that.
// Zeros keep their sign.
//
// Packed: the codes, round_up(count, 16) bytes; then an exponent of the scale a block, as a signed byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TERRACE_FP8_INLINE __host__ __device__ inline
#else
#define TERRACE_FP8_INLINE inline
#endif

namespace terrace {

// What a block of memory is made of, as far as anybody said.
enum class Element : std::uint8_t { kOpaque = 0, kF32, kBf16 };

inline constexpr std::uint64_t kFp8Block = 128;
inline constexpr int kFp8LeastExponent = -124, kFp8MostExponent = 119;
inline constexpr std::uint32_t kFp8Largest = 0x7D, kFp8Infinity = 0x7E, kFp8Nan = 0x7F;

// How far packed numbers are off, summed over packs. Zeros to begin with; in device memory.
struct Fp8Error {
  double error_sum;      // of |x - what comes back|, over finite x
  double magnitude_sum;  // of |x|
  float largest_share;   // of a block's largest error, of the block's largest |x|
  float reserved;
};

// One packing or unpacking: count numbers of that element, both sides in device memory, 16-byte aligned.
struct Fp8Blocks {
  Element element;  // not kOpaque
  std::uint64_t count;
  std::byte* numbers;
  std::byte* packed;  // fp8_bytes(count)
  Fp8Error* error;    // of packing: added to; null: nobody wants it
};

TERRACE_FP8_INLINE std::uint64_t fp8_blocks(std::uint64_t count) {
  return (count + kFp8Block - 1) / kFp8Block;
}
TERRACE_FP8_INLINE std::uint64_t fp8_code_bytes(std::uint64_t count) { return (count + 15) / 16 * 16; }
TERRACE_FP8_INLINE std::uint64_t fp8_bytes(std::uint64_t count) {
  return fp8_code_bytes(count) + fp8_blocks(count);
}

// --- The arithmetic of a number; all of it is exact but for the one rounding to a code. ---

TERRACE_FP8_INLINE std::uint32_t fp8_bits(float number) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}
TERRACE_FP8_INLINE float fp8_float(std::uint32_t bits) {
  float number = 0;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// Of a block whose largest finite |x| has these bits.
TERRACE_FP8_INLINE int fp8_exponent(std::uint32_t largest_bits) {
  constexpr std::uint32_t kMantissa = 0x7FFFFF, kMostMantissa = 0x500000;  // 1.625
  const int exponent = static_cast<int>(largest_bits >> 23) - 127;
  const int wanted = exponent - ((largest_bits & kMantissa) <= kMostMantissa ? 8 : 7);
  return wanted < kFp8LeastExponent  ? kFp8LeastExponent
         : wanted > kFp8MostExponent ? kFp8MostExponent
                                     : wanted;
}
// 2^exponent; from -126 to 127.
TERRACE_FP8_INLINE float fp8_power(int exponent) {
  return fp8_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// `inverse`: 2^-exponent of the block.
TERRACE_FP8_INLINE std::uint32_t fp8_encode(float number, float inverse) {
  constexpr std::uint32_t kAbsolute = 0x7FFFFFFF, kInfinityBits = 0x7F800000;
  const std::uint32_t bits = fp8_bits(number);
  const std::uint32_t sign = bits >> 24 & 0x80;
  if ((bits & kAbsolute) >= kInfinityBits)
    return sign | ((bits & kAbsolute) == kInfinityBits ? kFp8Infinity : kFp8Nan);
  const std::uint32_t scaled = fp8_bits(fp8_float(bits & kAbsolute) * inverse);
  // Below 2^-6 codes are 2^-9 apart, as floats are behind 2^14. Above, the highest 3 bits of mantissa stay.
  constexpr std::uint32_t kLeastNormal = 0x3C800000;  // 2^-6
  const std::uint32_t small = fp8_bits(fp8_float(scaled) + 16384.0F) & 0xF;
  const std::uint32_t large = ((scaled + 0x7FFFF + (scaled >> 20 & 1)) >> 20) - (120U << 3);
  const std::uint32_t code = scaled < kLeastNormal ? small : large;
  return sign | (code > kFp8Largest ? kFp8Largest : code);
}

// `scale`: 2^exponent of the block.
TERRACE_FP8_INLINE float fp8_decode(std::uint32_t code, float scale) {
  const std::uint32_t sign = (code & 0x80) << 24;
  const std::uint32_t rest = code & 0x7F;
  if (rest >= kFp8Infinity) return fp8_float(sign | (rest == kFp8Infinity ? 0x7F800000U : 0x7FC00000U));
  const float small = static_cast<float>(rest) * (1.0F / 512);
  const float magnitude = rest < 8 ? small : fp8_float((rest << 20) + (120U << 23));
  return fp8_float(sign | fp8_bits(magnitude * scale));
}

}  // namespace terrace
