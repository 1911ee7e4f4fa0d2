// Rotary position embedding of part of each head. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/conv.hpp"

namespace terrace::trainer {

// Which numbers of a head's rotary part make pair i of n: halves (i, n + i), or neighbours (2i, 2i + 1).
enum class RotaryLayout : std::uint8_t { kHalf, kInterleaved };
// kInverse turns back: with the same factor it is the gradient of kForward.
enum class RotaryDirection : std::uint8_t { kForward, kInverse };

// Pair i of a token at position p turns by the angle p f_i: (a, b) -> factor (a cos - b sin, b cos + a sin).
// f_i = theta^(-2 i / rotary_width), or `frequency` where given. Angles are formed and reduced in double, so
// they are right at any int32 position. The rest of the head is copied where y is not x. A stride is as in
// conv.hpp; 0: heads * width.
struct Rotary {
  std::int64_t batch, length, heads, width;
  std::int64_t offset = 0, rotary_width = 0;  // the part of each head that turns; rotary_width is even
  RotaryLayout layout = RotaryLayout::kHalf;
  RotaryDirection direction = RotaryDirection::kForward;
  const std::int32_t* positions = nullptr;  // (B * T); null: the index in the sequence
  Packing packing = {};                     // then batch is 1
  double theta = 10000.0;
  const float* frequency = nullptr;  // (rotary_width / 2)
  float factor = 1.0F;
  In x;   // (B, T, heads, width)
  Out y;  // the same; may be x
  std::int64_t x_stride = 0, y_stride = 0;
};
template <typename F>
void visit_arrays(Rotary& op, F&& visit) {
  visit(op.x, strided_count(op.batch * op.length, op.heads * op.width, op.x_stride));
  visit(op.y, strided_count(op.batch * op.length, op.heads * op.width, op.y_stride));
}

}  // namespace terrace::trainer
