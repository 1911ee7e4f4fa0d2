// Rows held in registers: a group of threads takes a row, kPacks packs of 16 bytes a thread, so that the row
// is read once and all its loads are under way together. Groups of up to a warp share blocks of 256 threads;
// a larger group is a block.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {

template <typename T, int kThreadsEach, int kPacksEach>
struct RowGroup {
  using Element = T;
  static constexpr int kThreads = kThreadsEach, kPacks = kPacksEach;
  static constexpr int kBlock = kThreads <= kWarp ? 256 : kThreads;
  static constexpr int kRows = kBlock / kThreads;  // of a block
  // Blocks of a multiprocessor, where each takes many rows.
  static constexpr int kResident = (kThreads <= kWarp && kPacks <= 2 ? 768 : 512) / kBlock;
  static constexpr int kNumbers = kPack<T>;  // of a pack
  static constexpr std::int64_t kWidest = std::int64_t{kThreads} * kPacks * kNumbers;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kThreads; }
  static __device__ int row_in_block() { return static_cast<int>(threadIdx.x) / kThreads; }
  // The thread's i-th pack, as an offset in the row; at or past `width`: none.
  static __device__ int column(int i) { return (lane() + i * kThreads) * kNumbers; }
};

// body(RowGroup) with one wide enough for `width` numbers; false where there is none, or 16 bytes do not
// divide the rows.
template <typename T, typename Body>
bool with_row_group(std::int64_t width, Body&& body) {
  if (width <= 0 || width % kPack<T> != 0) return false;
  const auto take = [&](auto group) { return body(group), true; };
  if (width <= RowGroup<T, 2, 2>::kWidest) return take(RowGroup<T, 2, 2>{});
  if (width <= RowGroup<T, 8, 2>::kWidest) return take(RowGroup<T, 8, 2>{});
  if (width <= RowGroup<T, 32, 2>::kWidest) return take(RowGroup<T, 32, 2>{});
  if (width <= RowGroup<T, 32, 4>::kWidest) return take(RowGroup<T, 32, 4>{});
  if (width <= RowGroup<T, 128, 4>::kWidest) return take(RowGroup<T, 128, 4>{});
  if (width <= RowGroup<T, 256, 4>::kWidest) return take(RowGroup<T, 256, 4>{});
  if (width <= RowGroup<T, 512, 4>::kWidest) return take(RowGroup<T, 512, 4>{});
  return false;
}

// Sums over the group, all threads of the block take part and get their group's.
template <typename Group, int kSums>
__device__ void group_sums(float (&sums)[kSums]) {
  constexpr int kLanes = Group::kThreads < kWarp ? Group::kThreads : kWarp;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] += __shfl_xor_sync(kFullWarp, sums[i], offset);
  }
  if constexpr (Group::kThreads > kWarp) {
    constexpr int kWarps = Group::kThreads / kWarp;
    __shared__ float partial[kSums][kWarps];
    __syncthreads();  // the last call's readers are done
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) partial[i][threadIdx.x / kWarp] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      float total = 0.0F;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += partial[i][warp];
      sums[i] = total;
    }
  }
}

// A thread's packs of a row; zeros past its width, and where the group has no row.
template <typename Group>
__device__ void load_row(const typename Group::Element* row, std::int64_t width, bool live,
                         uint4 (&to)[Group::kPacks]) {
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    const int column = Group::column(i);
    to[i] = live && column < width ? stream_raw(row + column) : uint4{0, 0, 0, 0};
  }
}

// Sums of columns over all rows that a block took, from a thread's own: to `partial`, a row of `width` a
// block.
template <typename Group>
__device__ void store_column_parts(const float (&own)[Group::kPacks][Group::kNumbers], std::int64_t width,
                                   float* partial) {
  float* to = partial + std::int64_t{blockIdx.x} * width;
  if constexpr (Group::kRows == 1) {
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) {
      const int column = Group::column(i);
      if (column >= width) continue;
#pragma unroll
      for (int n = 0; n < Group::kNumbers; ++n) to[column + n] = own[i][n];
    }
  } else {
    __shared__ float rows[Group::kRows][Group::kWidest];
    __syncthreads();  // an earlier call's readers are done
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) {
#pragma unroll
      for (int n = 0; n < Group::kNumbers; ++n) rows[Group::row_in_block()][Group::column(i) + n] = own[i][n];
    }
    __syncthreads();
    for (int column = static_cast<int>(threadIdx.x); column < width; column += Group::kBlock) {
      float total = 0.0F;
      for (int row = 0; row < Group::kRows; ++row) total += rows[row][column];
      to[column] = total;
    }
  }
}

// Blocks of a kernel whose blocks each take many rows: a number that depends on the shape alone, so that the
// sums over rows have the same bits on every device. Fills one of 132 multiprocessors.
template <typename Group>
[[nodiscard]] std::int64_t row_blocks(std::int64_t rows) {
  return std::min(ceil_div(rows, Group::kRows), std::int64_t{132} * Group::kResident);
}

}  // namespace terrace::trainer::cuda
