// What the two walks along a sequence share. A warp owns sixteen columns of values: its state, transposed, is
// sixteen accumulator tiles, rows values and columns keys, in registers from the first chunk to the last.
// Packed to pairs they are operand A as they stand, so warps share the tiles in shared memory and nothing
// else. A block is as many warps as there are columns for it; tiles come by bulk copies, a chunk ahead.
//
// Operands are fp16: an eighth of bf16's rounding, which nearly equal keys need (docs/OPERATORS.md). On the
// side of keys all is at most 1. Values have any size, so each value column is kept times a power of two of
// its own (Lift), chosen anew where the column leaves the middle of fp16's range.
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

// A state is read and written as it is, not lifted.
__device__ inline void read_state(const float* from, int first, StateTiles& state) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      state[n][c] = from == nullptr ? 0.0F : from[key_of(n, c) * kChunkedWidth + first + value_of(c)];
    }
  }
}
__device__ inline void write_state(const StateTiles& state, const float (&down)[2], int first, float* to) {
  if (to == nullptr) return;
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      to[key_of(n, c) * kChunkedWidth + first + value_of(c)] = down[c / 2] * state[n][c];
    }
  }
}
// Of four lanes side by side, word i of lane j goes to word j of lane i.
__device__ inline void transpose_quad(std::uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (static_cast<int>(threadIdx.x) & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) != 0) continue;
      const std::uint32_t got = __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + bit], bit);
      (upper ? x[i] : x[i + bit]) = got;
    }
  }
}
// The warp's rows of a (128, 128) tile in scratch, in bf16. Of four neighbouring tiles a quad has four whole
// pieces; it exchanges them, so that each lane writes one.
__device__ inline void write_state_tile(const StateTiles& state, const float (&down)[2], int first,
                                        unsigned char* tile) {
  const int quad = static_cast<int>(threadIdx.x) & 3;
#pragma unroll
  for (int n = 0; n < 16; n += 4) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      std::uint32_t x[4];  // piece n + i, pair `quad`
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = pack_bf16(down[e] * state[n + i][2 * e], down[e] * state[n + i][2 * e + 1]);
      }
      transpose_quad(x);  // piece n + quad, pair i
      *reinterpret_cast<uint4*>(tile + WideTile::at(first + value_of(2 * e), n + quad)) = as_piece(x);
    }
  }
}

// What the thread's two value columns are multiplied by: up = 2^exponent, and its inverse.
struct Lift {
  int exponent[2] = {0, 0};
  float up[2] = {1.0F, 1.0F}, down[2] = {1.0F, 1.0F};
};
// Largest magnitudes of bf16 pairs, by column.
__device__ inline float largest(const std::uint32_t (&pairs)[8]) {
  std::uint32_t most = 0;
#pragma unroll
  for (const std::uint32_t pair : pairs) most = max_of_each(most, pair & 0x7fff7fffU);
  return fmaxf(low_half(most), high_half(most));
}
// Before a chunk with `inputs` (bf16 v or do, of each column) to come, times `factor` at most. A column's
// sums grow in a chunk by no more than 64 inputs, and its 128 keys are at most sqrt(128) times their largest:
// with that and 8 inputs under 2^11, nothing in the chunk exceeds 2^15.3.
__device__ inline void lift_columns(const float (&inputs)[2], float factor, StateTiles& state, Lift& lift) {
  float by[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float most = 8.0F * factor * inputs[e] * lift.up[e];
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      most = fmaxf(most, fmaxf(fabsf(state[n][2 * e]), fabsf(state[n][2 * e + 1])));
    }
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
    by[e] = 1.0F;
    if (most > 2048.0F || (most < 0.125F && most > 0.0F)) {
      int exponent = lift.exponent[e] + 131 - static_cast<int>(__float_as_uint(most) >> 23);  // to 2^4
      exponent = max(-126, min(100, exponent));
      const int change = max(-126, min(126, exponent - lift.exponent[e]));
      lift.exponent[e] += change;
      by[e] = __uint_as_float(static_cast<std::uint32_t>(127 + change) << 23);
      lift.up[e] = __uint_as_float(static_cast<std::uint32_t>(127 + lift.exponent[e]) << 23);
      lift.down[e] = __uint_as_float(static_cast<std::uint32_t>(127 - lift.exponent[e]) << 23);
    }
  }
  if (by[0] != 1.0F || by[1] != 1.0F) {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) state[n][c] *= by[c / 2];
    }
  }
  __syncwarp();
}

// acc (16 values, 64 rows) += state (16, 128), keys from 16 `step`, times rows^T, rows a WideTile (64, 128).
__device__ inline void add_step(const std::uint32_t (&state)[4], const unsigned char* rows, int step,
                                float (&acc)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    std::uint32_t b[4];
    load_b<WideTile>(b, rows, 8 * n, 2 * step);
    mma_half(acc[n], state, b[0], b[1]);
    mma_half(acc[n + 1], state, b[2], b[3]);
  }
}
// acc (16 values, 64 rows) += columns pairs^T, pairs lower triangular: row i takes rows j <= i.
__device__ inline void add_earlier(const std::uint32_t (&columns)[4][4], const unsigned char* pairs,
                                   float (&acc)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int n = 2 * step; n < 8; n += 2) {
      std::uint32_t b[4];
      load_b<SquareTile>(b, pairs, 8 * n, 2 * step);
      mma_half(acc[n], columns[step], b[0], b[1]);
      mma_half(acc[n + 1], columns[step], b[2], b[3]);
    }
  }
}
// acc += columns pairs: row j takes rows i >= j.
__device__ inline void add_later(const std::uint32_t (&columns)[4][4], const unsigned char* pairs,
                                 float (&acc)[8][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int n = 0; n <= 2 * step; n += 2) {
      std::uint32_t b[4];
      load_b_transposed<SquareTile>(b, pairs, 16 * step, n);
      mma_half(acc[n], columns[step], b[0], b[1]);
      mma_half(acc[n + 1], columns[step], b[2], b[3]);
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
      mma_half(state[n], columns[step], b[0], b[1]);
      mma_half(state[n + 1], columns[step], b[2], b[3]);
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
  for (int step = 0; step < 4; ++step) as_half_operand(acc[2 * step], acc[2 * step + 1], columns[step]);
}
// The same times a factor a value column, in bf16: to leave the warp.
__device__ inline void pack_results(const float (&acc)[8][4], const float (&factor)[2],
                                    std::uint32_t (&columns)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&tile)[4] = acc[2 * step + i / 2];
      const int e = i % 2;
      columns[step][i] = pack_bf16(factor[e] * tile[2 * e], factor[e] * tile[2 * e + 1]);
    }
  }
}

// What that rounding left, in place of its result.
__device__ inline void pack_rests(const float (&acc)[8][4], const float (&factor)[2],
                                  std::uint32_t (&columns)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&tile)[4] = acc[2 * step + i / 2];
      const int e = i % 2;
      columns[step][i] = rest_of(columns[step][i], factor[e] * tile[2 * e], factor[e] * tile[2 * e + 1]);
    }
  }
}

// Rows of v or do in shared memory, a warp's sixteen columns 32 bytes each; a row longer by one piece keeps
// eight rows in different banks.
template <int kWarps>
struct ValueRows {
  static constexpr int kRowBytes = kWarps * 32 + 16;
  unsigned char row[kChunk * kRowBytes];

  // The warp's, transposed: word 4 step + i is operand A's register i, bf16.
  __device__ void load_columns(std::uint32_t (&columns)[4][4]) const {
    const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_matrices_transposed(columns[step], row + (16 * step + (matrix >> 1) * 8 + r) * kRowBytes +
                                                  warp * 32 + (matrix & 1) * 16);
    }
  }
};
__device__ inline void largest_inputs(const std::uint32_t (&columns)[4][4], float (&most)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    std::uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = columns[i / 2][2 * (i % 2) + e];
    most[e] = largest(pairs);
  }
}
__device__ inline int rows_there(const SequencePlace& at, std::int64_t index) {
  const std::int64_t left = at.length - index * kChunk;
  return static_cast<int>(left < kChunk ? left : kChunk);
}
// By the first warp: the block's columns of one chunk's rows, which count on `full`; rows past the sequence
// are zeroed by hand.
template <int kWarps>
__device__ void request_rows(const KdaChunked& a, const std::uint16_t* from, const SequencePlace& at,
                             std::int64_t index, const StateColumn& mine, ValueRows<kWarps>& to,
                             hopper::Barrier* full) {
  constexpr std::uint32_t kRow = kWarps * 32;
  const int rows = rows_there(at, index);
  for (int row = static_cast<int>(threadIdx.x) & 31; row < kChunk; row += kWarp) {
    unsigned char* place = to.row + row * ValueRows<kWarps>::kRowBytes;
    if (row < rows) {
      const std::int64_t token = at.first_token + index * kChunk + row;
      load_bulk(place, from + (token * a.value_heads + mine.head) * kChunkedWidth + mine.first, kRow, full);
    } else {
      for (std::uint32_t i = 0; i < kRow; i += 16) {
        *reinterpret_cast<uint4*>(place + i) = make_uint4(0, 0, 0, 0);
      }
    }
  }
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
