// The product of one 64 x 64 tile by a block of 256 threads, 4 x 4 numbers a thread, in plain fp32.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/elements.cuh"

namespace terrace::trainer::cuda {

inline constexpr int kTile = 64;
inline constexpr int kTileDepth = 16;
inline constexpr int kTileThreads = 256;
inline constexpr int kTilePatch = 4;  // rows and columns a thread

// Where the numbers of one operand lie: element (i, d) of `extent` x depth at data[i * step + d *
// depth_step].
template <typename T = float>  // or Bf16
struct TileOperand {
  const T* data;
  std::int64_t extent;  // rows (or columns) of the tile that exist, counted from its start; more are zero
  std::int64_t step;
  std::int64_t depth_step;
};

// The tile's rows row + i and columns column + j of this thread.
struct TilePlace {
  int row;
  int column;
};
__device__ inline TilePlace tile_place() {
  return {static_cast<int>(threadIdx.x) / (kTile / kTilePatch) * kTilePatch,
          static_cast<int>(threadIdx.x) % (kTile / kTilePatch) * kTilePatch};
}

template <typename T>
__device__ inline void load_tile(const TileOperand<T>& from, std::int64_t depth0, std::int64_t depth,
                                 float (&to)[kTileDepth][kTile + 1]) {
  for (int e = static_cast<int>(threadIdx.x); e < kTile * kTileDepth; e += kTileThreads) {
    // Neighbouring threads read neighbouring addresses.
    const int i = from.depth_step == 1 ? e / kTileDepth : e % kTile;
    const int d = from.depth_step == 1 ? e % kTileDepth : e / kTile;
    const bool inside = i < from.extent && depth0 + d < depth;
    to[d][i] = inside ? load_float(from.data + i * from.step + (depth0 + d) * from.depth_step) : 0.0F;
  }
}

// sum[i][j] += sum over d < depth of a(row + i, d) b(column + j, d), d ascending.
template <typename A, typename B>
__device__ inline void accumulate_tile(const TileOperand<A>& a, const TileOperand<B>& b, std::int64_t depth,
                                       float (&sum)[kTilePatch][kTilePatch]) {
  __shared__ float tile_a[kTileDepth][kTile + 1];
  __shared__ float tile_b[kTileDepth][kTile + 1];
  const TilePlace at = tile_place();
  for (std::int64_t depth0 = 0; depth0 < depth; depth0 += kTileDepth) {
    __syncthreads();
    load_tile(a, depth0, depth, tile_a);
    load_tile(b, depth0, depth, tile_b);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kTileDepth; ++d) {
      float left[kTilePatch];
      float right[kTilePatch];
#pragma unroll
      for (int i = 0; i < kTilePatch; ++i) {
        left[i] = tile_a[d][at.row + i];
        right[i] = tile_b[d][at.column + i];
      }
#pragma unroll
      for (int i = 0; i < kTilePatch; ++i) {
#pragma unroll
        for (int j = 0; j < kTilePatch; ++j) sum[i][j] += left[i] * right[j];
      }
    }
  }
}

}  // namespace terrace::trainer::cuda
