// out[c] [+]= sum over rows r of term(r, c), without atomics: partial sums of slices of rows, then the slices
// in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

inline constexpr int kColumnThreads = 128;

struct RowSlices {
  std::int64_t slices;
  std::int64_t rows_per_slice;
};
[[nodiscard]] inline RowSlices slice_rows(std::int64_t rows) {
  const std::int64_t wanted = std::clamp<std::int64_t>(ceil_div(rows, 32), 1, 256);
  const std::int64_t per_slice = std::max<std::int64_t>(1, ceil_div(rows, wanted));
  return {.slices = std::max<std::int64_t>(1, ceil_div(rows, per_slice)), .rows_per_slice = per_slice};
}

template <typename Term>
__global__ void column_partials(Term term, std::int64_t rows, std::int64_t columns,
                                std::int64_t rows_per_slice, float* partial) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
  if (column >= columns) return;
  const std::int64_t begin = std::int64_t{blockIdx.y} * rows_per_slice;
  const std::int64_t end = begin + rows_per_slice < rows ? begin + rows_per_slice : rows;
  float sum = 0.0F;
  for (std::int64_t row = begin; row < end; ++row) sum += term(row, column);
  partial[std::int64_t{blockIdx.y} * columns + column] = sum;
}

template <Accumulate kInto>
__global__ void column_totals(const float* partial, std::int64_t slices, std::int64_t columns, float* out) {
  const std::int64_t column = std::int64_t{blockIdx.x} * kColumnThreads + threadIdx.x;
  if (column >= columns) return;
  float sum = 0.0F;
  for (std::int64_t slice = 0; slice < slices; ++slice) sum += partial[slice * columns + column];
  out[column] = kInto == Accumulate::kAdd ? out[column] + sum : sum;
}

// partial: (slices, columns).
template <Accumulate kInto>
void sum_slices(OpCall& call, const float* partial, std::int64_t slices, std::int64_t columns, float* out) {
  call.launch(column_totals<kInto>, grid_for(columns, kColumnThreads), partial, slices, columns, out);
}

// Term is a functor: float operator()(int64 row, int64 column) on the device. Adds to `out`.
template <typename Term>
void add_column_sums(OpCall& call, const Term& term, std::int64_t rows, std::int64_t columns, float* out) {
  if (rows <= 0 || columns <= 0) return;
  const RowSlices slices = slice_rows(rows);
  auto* partial = call.scratch<float>(slices.slices * columns);
  call.launch(column_partials<Term>,
              Grid{.x = ceil_div(columns, kColumnThreads), .y = slices.slices, .threads = kColumnThreads},
              term, rows, columns, slices.rows_per_slice, partial);
  sum_slices<Accumulate::kAdd>(call, partial, slices.slices, columns, out);
}

}  // namespace terrace::trainer::cuda
