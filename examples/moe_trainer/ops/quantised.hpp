// Matrices as whole numbers of 8 bits, in blocks that share a scale: how frozen weights are kept. Common
// rules: ops.hpp.
//
// A block is 128 numbers of a row, the last one of a row as many as are left:
//
//   amax  = max |x| over the block, at least 2^-100
//   scale = amax / 127            fp32, rounded to nearest
//   q     = rint(x * (127 / amax))  quotient and product rounded to fp32, then to nearest, ties to even
//   x'    = q * scale             fp32, then rounded to the type of y
//
// so zeros stay zeros and |x' - x| is at most half a scale beside the rounding of fp32. A block with a NaN or
// an infinity has the scale NaN and every q 0: it comes back as NaN. Devices agree to the bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

inline constexpr std::int64_t kBlockWidth = 128;
inline constexpr float kLargestOfBlock = 127.0F;
inline constexpr float kLeastOfBlock = 0x1p-100F;

// Blocks of a row.
[[nodiscard]] TERRACE_HOST_DEVICE constexpr std::int64_t blocks_of(std::int64_t width) {
  return (width + kBlockWidth - 1) / kBlockWidth;
}

// What a block's numbers are multiplied by, and what undoes it; factor 0 where the scale is NaN.
struct BlockScale {
  float factor, scale;
};
// `amax_bits`: the largest |x| as the bits of an fp32 number, which are in the order of what they stand for.
[[nodiscard]] TERRACE_HOST_DEVICE inline BlockScale block_scale(std::uint32_t amax_bits) {
  float amax = 0;
  std::memcpy(&amax, &amax_bits, sizeof amax);
  if (amax_bits >= 0x7F800000U) {
    constexpr std::uint32_t kNan = 0x7FC00000U;
    std::memcpy(&amax, &kNan, sizeof amax);
    return {0.0F, amax};
  }
  if (amax < kLeastOfBlock) amax = kLeastOfBlock;
  return {kLargestOfBlock / amax, amax / kLargestOfBlock};
}

struct QuantiseBlocks {
  std::int64_t rows, width;
  In x;            // (rows, width)
  std::int8_t* q;  // (rows, width)
  float* scale;    // (rows, blocks_of(width))
};
template <typename F>
void visit_arrays(QuantiseBlocks& op, F&& visit) {
  visit(op.x, op.rows * op.width);
}
struct DequantiseBlocks {
  std::int64_t rows, width;
  const std::int8_t* q;  // (rows, width)
  const float* scale;    // (rows, blocks_of(width))
  Out y;                 // (rows, width)
};
template <typename F>
void visit_arrays(DequantiseBlocks& op, F&& visit) {
  visit(op.y, op.rows * op.width);
}

// QuantiseBlocks of fp32 numbers in the host's memory.
void quantise_blocks(const QuantiseBlocks& op);

}  // namespace terrace::trainer
