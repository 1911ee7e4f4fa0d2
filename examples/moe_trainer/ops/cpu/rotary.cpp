// Pair i of a token at position p turns by p f_i; angles are formed and reduced in double.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

struct Turn {
  float cosine, sine;
};

std::int64_t position_of(const Rotary& op, std::int64_t token) {
  if (op.positions != nullptr) return op.positions[token];
  if (!op.packing) return token % op.length;
  const std::int32_t* end = op.packing.starts + op.packing.sequences + 1;
  return token - *(std::upper_bound(op.packing.starts, end, token) - 1);
}

// The inverse is the transpose: the sine changes its sign.
void turns_of(const Rotary& op, std::int64_t token, std::vector<Turn>& turns) {
  const auto position = static_cast<double>(position_of(op, token));
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(op.rotary_width);
    const double frequency =
        op.frequency != nullptr ? static_cast<double>(op.frequency[i]) : std::pow(op.theta, exponent);
    const double angle = position * frequency, factor = static_cast<double>(op.factor);
    const double sine = op.direction == RotaryDirection::kForward ? std::sin(angle) : -std::sin(angle);
    turns[i] = {static_cast<float>(std::cos(angle) * factor), static_cast<float>(sine * factor)};
  }
}

void turn_head(const Rotary& op, const std::vector<Turn>& turns, const float* x, float* y) {
  if (x != y) {
    std::copy_n(x, op.offset, y);
    const std::int64_t rest = op.offset + op.rotary_width;
    std::copy(x + rest, x + op.width, y + rest);
  }
  const auto pairs = static_cast<std::int64_t>(turns.size());
  const bool halves = op.layout == RotaryLayout::kHalf;
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int64_t first = op.offset + (halves ? i : 2 * i), second = first + (halves ? pairs : 1);
    const Turn turn = turns[static_cast<std::size_t>(i)];
    const float a = x[first], b = x[second];
    y[first] = a * turn.cosine - b * turn.sine;
    y[second] = b * turn.cosine + a * turn.sine;
  }
}

}  // namespace

// Called when the operator is enqueued, so a bad shape is reported to the caller.
Bytes scratch_bytes(const Rotary& op) {
  if (op.rotary_width < 0 || op.rotary_width % 2 != 0 || op.offset < 0 ||
      op.offset + op.rotary_width > op.width) {
    throw std::runtime_error("rotary embedding: the part that turns must be even and lie inside the head");
  }
  return {};
}

void compute(const Rotary& op, std::byte*) {
  const std::int64_t row = op.heads * op.width;
  const std::int64_t x_stride = op.x_stride == 0 ? row : op.x_stride;
  const std::int64_t y_stride = op.y_stride == 0 ? row : op.y_stride;
  parallel_ranges(op.batch * op.length, 16, [&](std::int64_t begin, std::int64_t end) {
    std::vector<Turn> turns(static_cast<std::size_t>(op.rotary_width / 2));
    for (std::int64_t token = begin; token < end; ++token) {
      turns_of(op, token, turns);
      for (std::int64_t head = 0; head < op.heads; ++head) {
        turn_head(op, turns, op.x + token * x_stride + head * op.width,
                  op.y + token * y_stride + head * op.width);
      }
    }
  });
}

}  // namespace terrace::trainer::cpu
