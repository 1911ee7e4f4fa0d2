// What the two walks along a sequence share. A warp owns sixteen columns of values: its state, transposed, is
// sixteen accumulator tiles, rows values and columns keys, in registers from the first chunk to the last.
// Packed to bf16 pairs they are operand A as they stand, so warps share the tiles in shared memory and
// nothing else. A block is as many warps as there are columns for it; tiles come by bulk copies, a chunk
// ahead.
#pragma once

#include "examples/moe_trainer/ops/cuda/kda_chunked.cuh"

namespace terrace::trainer::cuda {

inline constexpr int kStages = 2;

using StateTiles = float[16][4];  // n-th tile: keys 8 n ..; rows g, g + 8 of the warp's sixteen values

struct StateColumn {
  std::int64_t sequence, head;
  int first;  // the warp's first value column
};
__device__ inline std::int64_t state_offset(const KdaChunked& a, std::int64_t slot, std::int64_t head) {
  return (slot * a.value_heads + head) * kChunkedWidth * kChunkedWidth;
}
// Between turns only one packed sequence is under way, and every batch row.
__device__ inline std::int64_t carry_slot(const KdaChunked& a, std::int64_t sequence) {
  return a.starts == nullptr ? sequence : 0;
}
// Key and value of an accumulator element.
__device__ inline int key_of(int n, int c) {
  return 8 * n + 2 * (static_cast<int>(threadIdx.x) & 3) + (c & 1);
}
__device__ inline int value_of(int c) { return ((static_cast<int>(threadIdx.x) & 31) >> 2) + 8 * (c >> 1); }

__device__ inline void read_state(const float* from, int first, StateTiles& state) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      state[n][c] = from == nullptr ? 0.0F : from[key_of(n, c) * kChunkedWidth + first + value_of(c)];
    }
  }
}
__device__ inline void write_state(const StateTiles& state, int first, float* to) {
  if (to == nullptr) return;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) to[key_of(n, c) * kChunkedWidth + first + value_of(c)] = state[n][c];
  }
}
// The warp's rows of a (128, 128) tile in scratch.
__device__ inline void write_state_tile(const StateTiles& state, int first, unsigned char* tile) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    store_pair<WideTile>(tile, first + value_of(0), n, state[n][0], state[n][1]);
    store_pair<WideTile>(tile, first + value_of(2), n, state[n][2], state[n][3]);
  }
}
// Two accumulator tiles side by side as operand A.
__device__ inline void as_operand(const float (&left)[4], const float (&right)[4], std::uint32_t (&a)[4]) {
  a[0] = pack_bf16(left[0], left[1]);
  a[1] = pack_bf16(left[2], left[3]);
  a[2] = pack_bf16(right[0], right[1]);
  a[3] = pack_bf16(right[2], right[3]);
}

// acc (16 values, 64 rows) += state (16, 128) times rows^T, rows a WideTile (64, 128).
__device__ inline void state_times_rows(const StateTiles& state, const unsigned char* rows,
                                        float (&acc)[8][4]) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    std::uint32_t a[4];
    as_operand(state[2 * step], state[2 * step + 1], a);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      std::uint32_t b[4];
      load_b<WideTile>(b, rows, 8 * n, 2 * step);
      mma_bf16(acc[n], a, b[0], b[1]);
      mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
  }
}
// state (16, 128) += columns (16, 64) times rows (64, 128).
__device__ inline void add_outer(const std::uint32_t (&columns)[4][4], const unsigned char* rows,
                                 StateTiles& state) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      std::uint32_t b[4];
      load_b_transposed<WideTile>(b, rows, 16 * step, n);
      mma_bf16(state[n], columns[step], b[0], b[1]);
      mma_bf16(state[n + 1], columns[step], b[2], b[3]);
    }
  }
}
__device__ inline void decay_keys(const float* decay, StateTiles& state) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float2 d = *reinterpret_cast<const float2*>(decay + key_of(n, 0));
    state[n][0] *= d.x, state[n][1] *= d.y, state[n][2] *= d.x, state[n][3] *= d.y;
  }
}
__device__ inline void pack_columns(const float (&acc)[8][4], std::uint32_t (&columns)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) as_operand(acc[2 * step], acc[2 * step + 1], columns[step]);
}

// (16 values, 64 rows) of operand A to the warp's own 2 KiB as 64 rows of 16 values: one column of a
// ColumnTile.
__device__ inline void stage_columns(const std::uint32_t (&columns)[4][4], unsigned char* staged) {
  const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
  __syncwarp();  // the last use is over
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    store_matrices_transposed(staged + ColumnTile::at(16 * step + (matrix >> 1) * 8 + r, matrix & 1),
                              columns[step]);
  }
  __syncwarp();
}
__device__ inline void copy_column(const unsigned char* staged, unsigned char* to) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = (i * kWarp + lane) * 16;
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(staged + at);
  }
}

// The chunks of a sequence that lie in this turn: indices [begin, end).
struct TurnChunks {
  std::int64_t begin, end;
};
__device__ inline TurnChunks turn_chunks(const KdaChunked& a, const SequencePlace& at) {
  const auto first_from = [&](std::int64_t entry) {
    const std::int64_t ahead = entry - at.first_entry;
    const std::int64_t index = ahead <= 0 ? 0 : (ahead + at.step - 1) / at.step;
    return index < at.chunks ? index : at.chunks;
  };
  return {first_from(a.first), first_from(a.first + a.count)};
}
__device__ inline std::int64_t tile_index(const KdaChunked& a, const SequencePlace& at, std::int64_t index,
                                          std::int64_t head) {
  return (at.first_entry + index * at.step - a.first) * a.value_heads + head;
}

// Enough blocks to fill the device where there are few heads: 8, 4 or 2 warps, 1, 2 or 4 blocks a head.
template <typename LaunchWarps>
void with_warps(const KdaChunked& chunked, const LaunchWarps& launch_warps) {
  const std::int64_t states = chunked.sequences * chunked.value_heads;
  if (states >= 66) {
    launch_warps.template operator()<8>();
  } else if (states >= 33) {
    launch_warps.template operator()<4>();
  } else {
    launch_warps.template operator()<2>();
  }
}

}  // namespace terrace::trainer::cuda
