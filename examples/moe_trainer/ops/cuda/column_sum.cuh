// out[c] [+]= sum over rows r of term(r, c), without atomics: partial sums of slices of rows, then the slices
// in one order.
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

// A block takes 32 columns; its warps take every kTotalWarps-th slice, with four loads on the way at a time,
// and the warps' sums are added in order.
inline constexpr int kTotalColumns = 32;
inline constexpr int kTotalWarps = 8;

// finish(column, sum) says what becomes of a total.
template <typename Finish>
__global__ void column_totals(const float* partial, std::int64_t slices, std::int64_t columns,
                              Finish finish) {
  __shared__ float sums[kTotalWarps][kTotalColumns];
  const int lane = static_cast<int>(threadIdx.x) % kTotalColumns;
  const int warp = static_cast<int>(threadIdx.x) / kTotalColumns;
  const std::int64_t column = std::int64_t{blockIdx.x} * kTotalColumns + lane;
  float sum[4] = {};
  if (column < columns) {
    const float* at = partial + column;
    for (std::int64_t slice = warp; slice < slices; slice += 4 * kTotalWarps) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t mine = slice + i * kTotalWarps;
        if (mine < slices) sum[i] += at[mine * columns];
      }
    }
  }
  sums[warp][lane] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  __syncthreads();
  if (warp != 0 || column >= columns) return;
  float total = 0.0F;
  for (int i = 0; i < kTotalWarps; ++i) total += sums[i][lane];
  finish(column, total);
}

template <Accumulate kInto>
struct StoreTotal {
  float* out;
  __device__ void operator()(std::int64_t column, float total) const {
    out[column] = kInto == Accumulate::kAdd ? out[column] + total : total;
  }
};

// partial: (slices, columns).
template <typename Finish>
void finish_slices(OpCall& call, const float* partial, std::int64_t slices, std::int64_t columns,
                   const Finish& finish) {
  call.launch(column_totals<Finish>,
              Grid{.x = ceil_div(columns, kTotalColumns), .threads = kTotalColumns * kTotalWarps}, partial,
              slices, columns, finish);
}
template <Accumulate kInto>
void sum_slices(OpCall& call, const float* partial, std::int64_t slices, std::int64_t columns, float* out) {
  finish_slices(call, partial, slices, columns, StoreTotal<kInto>{out});
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
