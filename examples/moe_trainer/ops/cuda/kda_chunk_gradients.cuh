// The gradients of one chunk, in two kernels that each take all chunks at once:
//
//   kda_chunk_borders     products with the walks' results: dA, dL, dv, and d(q D), d(k R), d(b k D) before
//                         their decays
//   kda_chunk_gradients   pairs inside the chunk, the sums along it, gate and norms
//
// The first leaves its results where what it read lay in scratch; nothing else reads those tiles afterwards.
#pragma once

#include "examples/moe_trainer/ops/cuda/kda_chunked.cuh"

namespace terrace::trainer::cuda {

void chunk_borders(OpCall& call, const KdaChunked& chunked, const KdaChunkOutputs& out);

// Of a (chunk, value head). d_q, d_k and d_kb (64, 128) lie as accumulators hold them: 16 rows and 16 columns
// after another, a lane's eight numbers together: whole numbers of 16 bits times a factor for each half of a
// row, closer than bf16 because sums along the chunk cancel. So do those with dA and dL: bf16 and rests.
struct KdaBorders {
  unsigned char *d_q, *d_k, *d_kb;  // do S^T, vn dS'^T, -dvb S^T
  unsigned char *d_a, *d_lb;        // dA and b dL below the diagonal, SquareTiles, side by side
  unsigned char *d_a_rest, *d_lb_rest;
  float* through;                    // (4, 128): rowsum(S dS'), of each quarter of the values
  float* along_v;                    // (64): <dvb, v>
  float* diagonal;                   // (64): of dA
  float *q_down, *k_down, *kb_down;  // (2, 64): the factors of d_q, d_k, d_kb
};
__device__ inline KdaBorders borders_of(const KdaChunked& a, std::int64_t tile) {
  unsigned char* state = a.state + tile * kStateTile;
  auto* sums = reinterpret_cast<float*>(state + 2 * kSquareTile);
  float* downs = sums + 4 * kChunkedWidth + 2 * kChunk;
  return {.d_q = a.vn + tile * kWideTile,
          .d_k = a.d_vb + tile * kWideTile,
          .d_kb = a.d_state + tile * kStateTile,
          .d_a = state,
          .d_lb = state + kSquareTile,
          .d_a_rest = a.a + tile * kSquareTile,
          .d_lb_rest = a.solve + tile * kSquareTile,
          .through = sums,
          .along_v = sums + 4 * kChunkedWidth,
          .diagonal = sums + 4 * kChunkedWidth + kChunk,
          .q_down = downs,
          .k_down = downs + 2 * kChunk,
          .kb_down = downs + 4 * kChunk};
}
// Where a lane's eight numbers lie: rows from `row`, columns from piece `piece` (even).
__device__ inline int lane_place(int row, int piece) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  return ((row / 16 * 8 + piece / 2) * kWarp + lane) * 16;
}

// Rows and columns of a warp's share of a (64, 128) result: sixteen rows, columns from a piece on.
struct WarpPlace {
  int row, piece;
  int group, quad;
  __device__ int row_of(int c) const { return row + group + 8 * (c >> 1); }
  __device__ int column_of(int n) const { return 8 * (piece + n) + 2 * quad; }
};
__device__ inline WarpPlace warp_place(int pieces) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) & 31;
  return {16 * (warp & 3), pieces * (warp >> 2), lane >> 2, lane & 3};
}

}  // namespace terrace::trainer::cuda
