// Grouped products of 8-bit floating point numbers, and how bf16 becomes such numbers. Common rules: ops.hpp.
//
// A number is e4m3 (OCP 8-bit floating point, the form without infinities: 4 exponent bits, 3 of mantissa,
// largest 448) times a scale that all numbers of one row of a product's operand share:
//
//   amax  = max |x| over the row, at least 2^-100; 448 where all are zero
//   scale = amax / 448               fp32, rounded to nearest
//   q     = e4m3(x * (448 / amax))   quotient and product rounded to fp32, then to nearest, ties to even
//
// so zeros stay zeros and the largest number of a row becomes 448. Rounding saturates. A row with a NaN or an
// infinity has the scale NaN and every q NaN (0x7F): its products are NaN. The bytes are specified to the
// bit: devices agree.
//
// A product is y = scale_a[r] scale_w[o] * sum over d of q_a[r, d] q_w[o, d], so scales must not vary along
// the summed dimension. Forward sums over input channels: a row of activations and an output channel of the
// weights have a scale each. The input gradient sums over output channels: a row of d_y and an input channel
// of the weights have one. Hence the weights are needed twice, quantised along either axis, and the second
// copy is stored transposed, which is also the only order that the matrix units take in 8 bits.
//
// Both copies are made once for all of a step's micro-batches, from the bf16 weights: 6 bytes of traffic a
// weight (two reads of bf16, two written bytes), beside some 30 of the optimizer. Made where they are used
// they would be made in forward, recomputation and backward of every micro-batch; with a few hundred rows an
// expert that takes about as long as the product itself. The price is 2 bytes of memory a weight.
//
// Weight gradients stay in bf16 (GroupedWeightGradient): they sum over an expert's rows, whose scales differ,
// so both operands would have to be quantised again, along the other axis; and what is lost there goes
// straight into the moments, where errors of activations average out over many terms.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "examples/moe_trainer/ops/linear.hpp"

namespace terrace::trainer {

// Sign, 4 bits of exponent with a bias of 7, 3 of mantissa; 0x7F and 0xFF are NaN.
struct E4m3 {
  std::uint8_t bits;
};
inline constexpr float kLargestE4m3 = 448.0F;
inline constexpr std::uint8_t kNanE4m3 = 0x7F;
inline constexpr float kLeastAmax = 0x1p-100F;

[[nodiscard]] TERRACE_HOST_DEVICE inline float to_float(E4m3 number) {
  const std::uint32_t sign = static_cast<std::uint32_t>(number.bits & 0x80U) << 24;
  const std::uint32_t magnitude = number.bits & 0x7FU;
  std::uint32_t bits = 0x7FC00000U;
  if (magnitude < 8) {  // multiples of 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    std::memcpy(&bits, &value, sizeof bits);
  } else if (magnitude != kNanE4m3) {
    bits = (magnitude << 20) + (120U << 23);
  }
  bits |= sign;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To nearest, ties to even, larger ones to 448; NaN to 0x7F.
[[nodiscard]] inline E4m3 to_e4m3(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint32_t sign = bits >> 24 & 0x80U;
  std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return {kNanE4m3};
  constexpr std::uint32_t kLargest = 0x43E00000U, kLeastNormal = 0x3C800000U;  // 448 and 2^-6
  if (magnitude < kLeastNormal) {
    // The mantissa's last place is moved to 2^-9; below a quarter of that nothing is left.
    const std::uint32_t places = std::min(141U - (magnitude >> 23), 25U);
    magnitude = (magnitude & 0x7FFFFFU) | 0x800000U;
    magnitude = (magnitude + (1U << (places - 1)) - 1U + (magnitude >> places & 1U)) >> places;
  } else {
    magnitude = std::min(magnitude, kLargest);
    magnitude = ((magnitude + 0x7FFFFU + (magnitude >> 20 & 1U)) >> 20) - (120U << 3);
  }
  return {static_cast<std::uint8_t>(sign | magnitude)};
}

// What a row's numbers are multiplied by, and what undoes it. `amax_bits`: the largest |x| of the row as the
// lower 15 bits of bf16, which are in the order of the numbers they stand for.
struct E4m3Scale {
  float factor, scale;
};
[[nodiscard]] TERRACE_HOST_DEVICE inline E4m3Scale e4m3_scale(std::uint32_t amax_bits) {
  std::uint32_t bits = amax_bits << 16;
  if (bits == 0) return {1.0F, 1.0F};
  if (bits >= 0x7F800000U) bits = 0x7FC00000U;
  float amax = 0;
  std::memcpy(&amax, &bits, sizeof amax);
  if (amax < kLeastAmax) amax = kLeastAmax;
  return {kLargestE4m3 / amax, amax / kLargestE4m3};
}

struct QuantiseRows {
  std::int64_t rows, width;
  In x;          // (rows, width), bf16
  E4m3* q;       // (rows, width)
  float* scale;  // (rows)
};
// The weights of experts for both products; a pair of null pointers: that copy is not wanted.
struct QuantiseWeights {
  std::int64_t groups, n, k;
  In w;                 // (groups, n, k), bf16
  E4m3* q;              // (groups, n, k), rows are output channels
  float* scale;         // (groups, n)
  E4m3* q_turned;       // (groups, k, n), rows are input channels
  float* turned_scale;  // (groups, k)
};
// c_r [+]= w_e a_r, of rows as in GroupedMatmul: those past the last offset are neither used nor written. The
// input gradient is the same with the turned weights: a is d_y, n and k change places.
struct GroupedMatmulFp8 {
  std::int64_t groups, rows, n, k;
  const std::int32_t* offsets;  // (groups + 1)
  const E4m3* a;                // (rows, k)
  const float* a_scale;         // (rows)
  const E4m3* w;                // (groups, n, k)
  const float* w_scale;         // (groups, n)
  Out c;                        // (rows, n), fp32 or bf16
  Accumulate into = Accumulate::kOverwrite;
};
template <typename F>
void visit_arrays(GroupedMatmulFp8& op, F&& visit) {
  visit(op.c, op.rows * op.n, op.into);
}

}  // namespace terrace::trainer
