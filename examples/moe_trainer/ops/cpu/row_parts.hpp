// Sums over the rows of a tensor, for the gradients of weights that every row shares.
//
// The rows are cut into at most kRowParts equal parts; each part has its own accumulator, and the
// accumulators are added in order, so the sum does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstddef>

#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec.hpp"
#include "runtime/units.hpp"

namespace terrace::trainer::cpu {

inline constexpr std::int64_t kRowParts = 16;

[[nodiscard]] inline Bytes row_parts_bytes(std::int64_t width) {
  return Bytes(static_cast<std::uint64_t>(kRowParts * width) * sizeof(float));
}

// body(row, accumulator of `width` floats) for every row, then out += the sum of the accumulators. With a
// null `out` only the rows run.
struct RowSum {
  std::int64_t rows, width;
  float* accumulators;  // row_parts_bytes(width)
};
template <typename Body>
void for_rows(const RowSum& sum, Body&& body) {
  std::fill_n(sum.accumulators, kRowParts * sum.width, 0.0F);
  const std::int64_t grain = std::max<std::int64_t>(1, (sum.rows + kRowParts - 1) / kRowParts);
  parallel_for((sum.rows + grain - 1) / grain, [&](std::int64_t part, std::int64_t) {
    const std::int64_t end = std::min(sum.rows, (part + 1) * grain);
    for (std::int64_t row = part * grain; row < end; ++row) body(row, sum.accumulators + part * sum.width);
  });
}
inline void add_row_parts(const RowSum& sum, std::int64_t first, std::int64_t count, float* out) {
  if (out == nullptr) return;
  for (std::int64_t part = 0; part < kRowParts; ++part) {
    axpy(1.0F, sum.accumulators + part * sum.width + first, out, count);
  }
}

}  // namespace terrace::trainer::cpu
