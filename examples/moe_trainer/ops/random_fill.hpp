// Arrays of random numbers: what weights start from. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"
#include "examples/moe_trainer/random.hpp"

namespace terrace::trainer {

enum class Draw : std::uint8_t {
  kConstant,  // a
  kNormal,    // a is the standard deviation, the mean is zero
  kUniform,   // between a and b
};
// y_i is number first + i of the random numbers, rounded to y's type. Infinities and NaN in a and b are what
// they are.
struct RandomFill {
  std::int64_t count;
  CounterRandom random;
  std::uint64_t first = 0;
  Draw draw = Draw::kConstant;
  double a = 0, b = 0;
  Out y;

  // Of number first + i, before it is rounded to less than fp32.
  [[nodiscard]] TERRACE_HOST_DEVICE float number(std::int64_t i) const {
    const std::uint64_t counter = first + static_cast<std::uint64_t>(i);
    switch (draw) {
      case Draw::kNormal:
        return static_cast<float>(a * random.normal(counter));
      case Draw::kUniform:
        return static_cast<float>(a + (b - a) * random.uniform(counter));
      case Draw::kConstant:
        break;
    }
    return static_cast<float>(a);
  }
};
template <typename F>
void visit_arrays(RandomFill& op, F&& visit) {
  visit(op.y, op.count);
}

}  // namespace terrace::trainer
