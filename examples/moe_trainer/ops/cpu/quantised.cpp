// Blocks of 8-bit whole numbers, made and undone.
#include "examples/moe_trainer/ops/quantised.hpp"

#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRowGrain = 16;

// Returns the scale.
float quantise_block(const float* x, std::int64_t count, std::int8_t* q) {
  std::uint32_t amax = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, x + i, sizeof bits);
    amax = std::max(amax, bits & 0x7FFFFFFFU);
  }
  const BlockScale by = block_scale(amax);
  if (by.factor == 0) {
    std::fill_n(q, count, std::int8_t{0});
    return by.scale;
  }
  for (std::int64_t i = 0; i < count; ++i) q[i] = static_cast<std::int8_t>(std::nearbyint(x[i] * by.factor));
  return by.scale;
}

void quantise_row(const QuantiseBlocks& op, std::int64_t row) {
  const float* x = op.x.f32() + row * op.width;
  for (std::int64_t block = 0; block < blocks_of(op.width); ++block) {
    const std::int64_t first = block * kBlockWidth;
    op.scale[row * blocks_of(op.width) + block] =
        quantise_block(x + first, std::min(kBlockWidth, op.width - first), op.q + row * op.width + first);
  }
}

}  // namespace

void compute(const QuantiseBlocks& op, std::byte*) {
  parallel_ranges(op.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) quantise_row(op, row);
  });
}

void compute(const DequantiseBlocks& op, std::byte*) {
  float* y = op.y;
  parallel_ranges(op.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t block = 0; block < blocks_of(op.width); ++block) {
        const float scale = op.scale[row * blocks_of(op.width) + block];
        const std::int64_t last = std::min(op.width, (block + 1) * kBlockWidth);
        for (std::int64_t i = row * op.width + block * kBlockWidth; i < row * op.width + last; ++i) {
          y[i] = static_cast<float>(op.q[i]) * scale;
        }
      }
    }
  });
}

}  // namespace terrace::trainer::cpu

namespace terrace::trainer {

void quantise_blocks(const QuantiseBlocks& op) { cpu::compute(op, nullptr); }

}  // namespace terrace::trainer
