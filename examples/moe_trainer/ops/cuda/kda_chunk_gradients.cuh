// The stages of the gradients of one chunk (kda_chunk_gradients.cu), in order. Warp w has rows 16 (w % 4) and
// columns 64 (w / 4), of the (64, 128) results; a thread's share of one is an accumulator of 8 tiles.
#pragma once

#include "examples/moe_trainer/ops/cuda/kda_chunked.cuh"

namespace terrace::trainer::cuda {

using RowTiles = float[8][4];
inline constexpr int kFloatRows = kChunk * kRowFloats * 4;  // bytes

struct KeyTiles {
  unsigned char q[kWideTile], k[kWideTile];
};
struct ValueTiles {
  unsigned char vn[kWideTile], d_vn[kWideTile];
};
struct SolvedTiles {
  unsigned char d_w[kWideTile], d_kb[kWideTile];
};
struct ResultTiles {
  unsigned char u[kWideTile], w[kWideTile];
};
// The members of a union follow one another in time.
struct GradientShared {
  union {
    unsigned char state[kStateTile];  // S
    KeyTiles rows;                    // as given, then a level's operands
    float d_q[kChunk * kRowFloats];
  };
  union {
    unsigned char d_state[kStateTile];  // dS'
    float after[kChunk * kRowFloats];   // what goes to g of this row and of earlier ones; then dg, then dz
  };
  union {
    ValueTiles in;
    SolvedTiles solved;
    float before[kChunk * kRowFloats];  // what goes to g of later rows; then the rows of dA
  };
  union {
    ResultTiles uw;
    float d_k[kChunk * kRowFloats];
  };
  union {
    unsigned char d_o[kWideTile];
    unsigned char d_vb[kWideTile];
  };
  unsigned char inverse[kSquareTile], d_a[kSquareTile], d_lb[kSquareTile];
  float G[kChunk * kRowFloats];
  float beta[kChunk], q_inverse[kChunk], k_inverse[kChunk];  // q's with the scale
  float d_beta[2][kChunk];                                   // of each half of the columns
  float through[2][kChunkedWidth], totals[4][kChunkedWidth];
  hopper::Barrier full;
};

struct WarpPlace {
  int row, piece;  // the first row; the first of eight pieces
  int group, quad;
  __device__ int row_of(int c) const { return row + group + 8 * (c >> 1); }
  __device__ int column_of(int n, int c) const { return 8 * (piece + n) + 2 * quad + (c & 1); }
};
__device__ inline WarpPlace warp_place() {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) & 31;
  return {16 * (warp & 3), 8 * (warp >> 2), lane >> 2, lane & 3};
}
__device__ inline std::uint32_t tile_pair(const unsigned char* tile, int row, int piece, int quad) {
  return *reinterpret_cast<const std::uint32_t*>(tile + WideTile::at(row, piece) + 4 * quad);
}
__device__ inline void store_tiles(unsigned char* tile, const WarpPlace& at, const RowTiles& acc) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    store_pair<WideTile>(tile, at.row_of(0), at.piece + n, acc[n][0], acc[n][1]);
    store_pair<WideTile>(tile, at.row_of(2), at.piece + n, acc[n][2], acc[n][3]);
  }
}
__device__ inline void store_rows(float* rows, const WarpPlace& at, const RowTiles& acc) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      *reinterpret_cast<float2*>(rows + at.row_of(c) * kRowFloats + at.column_of(n, c)) =
          make_float2(acc[n][c], acc[n][c + 1]);
    }
  }
}

// through[half] = over half of the values, rowsum(S dS').
__device__ inline void state_through(GradientShared& shared) {
  const int key = static_cast<int>(threadIdx.x) & 127, half = static_cast<int>(threadIdx.x) >> 7;
  float sum = 0.0F;
#pragma unroll 8
  for (int value = 64 * half; value < 64 * half + 64; ++value) {
    const int at = WideTile::at(value, key / 8) + 2 * (key % 8);
    const std::uint32_t s = *reinterpret_cast<const std::uint16_t*>(shared.state + at);
    const std::uint32_t d_s = *reinterpret_cast<const std::uint16_t*>(shared.d_state + at);
    sum += __uint_as_float(s << 16) * __uint_as_float(d_s << 16);
  }
  shared.through[half][key] = sum;
}

// d_q_start = do S^T, d_w = -dvn S^T, d_k_end = vn dS'^T.
__device__ inline void through_states(const GradientShared& shared, const WarpPlace& at, RowTiles& d_q_start,
                                      RowTiles& d_w, RowTiles& d_k_end) {
#pragma unroll 2
  for (int step = 0; step < 8; ++step) {
    std::uint32_t d_o[4], d_vn[4], vn[4];
    load_a<WideTile>(d_o, shared.d_o, at.row, 2 * step);
    load_a<ColumnTile>(d_vn, shared.in.d_vn, at.row, 2 * step);
    load_a<ColumnTile>(vn, shared.in.vn, at.row, 2 * step);
#pragma unroll
    for (std::uint32_t& pair : d_vn) pair ^= 0x80008000U;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      std::uint32_t s[4], d_s[4];
      load_b_transposed<WideTile>(s, shared.state, 16 * step, at.piece + n);
      load_b_transposed<WideTile>(d_s, shared.d_state, 16 * step, at.piece + n);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        mma_bf16(d_q_start[n + j], d_o, s[2 * j], s[2 * j + 1]);
        mma_bf16(d_w[n + j], d_vn, s[2 * j], s[2 * j + 1]);
        mma_bf16(d_k_end[n + j], vn, d_s[2 * j], d_s[2 * j + 1]);
      }
    }
  }
}

// acc (rows of `at`, 32 columns of its half) += left (64, 128) times right^T (64, 128).
template <typename Left, typename Right>
__device__ void add_square(const unsigned char* left, const unsigned char* right, const WarpPlace& at,
                           float (&acc)[4][4]) {
#pragma unroll 2
  for (int step = 0; step < 8; ++step) {
    std::uint32_t a[4];
    load_a<Left>(a, left, at.row, 2 * step);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      std::uint32_t b[4];
      load_b<Right>(b, right, 4 * at.piece + 8 * n, 2 * step);
      mma_bf16(acc[n], a, b[0], b[1]);
      mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
  }
}
// Zero where not i > j, or i >= j with `diagonal`.
enum class Diagonal : std::uint8_t { kWith, kWithout };
__device__ inline void store_square(unsigned char* tile, const WarpPlace& at, Diagonal diagonal,
                                    const float (&acc)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      const int i = at.row_of(c), piece = at.piece / 2 + n, j = 8 * piece + 2 * at.quad;
      const int last = diagonal == Diagonal::kWith ? i : i - 1;
      store_pair<SquareTile>(tile, i, piece, j <= last ? acc[n][c] : 0.0F,
                             j + 1 <= last ? acc[n][c + 1] : 0.0F);
    }
  }
}

// acc += M^T rows.
template <typename Tile>
__device__ void solve_transposed(const unsigned char* inverse, const unsigned char* rows, const WarpPlace& at,
                                 RowTiles& acc) {
  for (int step = at.row / 16; step < 4; ++step) {
    std::uint32_t a[4];
    load_a_transposed<SquareTile>(a, inverse, 16 * step, at.row / 8);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      std::uint32_t b[4];
      load_b_transposed<Tile>(b, rows, 16 * step, at.piece + n);
      mma_bf16(acc[n], a, b[0], b[1]);
      mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
  }
}

// Pairs inside the chunk, of dA (64, 64) and of dL with its rows times b.
struct PairSums {
  RowTiles d_q, d_k, d_g;
  float d_beta[2];  // b <dk2, k> of rows g and g + 8
};

// Operand A of a level inside a 16-row block: element (m, k) kept where its pair is in the level.
enum class Order : std::uint8_t { kRowColumn, kColumnRow };
__device__ inline void keep_level(std::uint32_t (&a)[4], int s, Order order) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int m = (lane >> 2) + 8 * (r & 1), k = 2 * (lane & 3) + 8 * (r >> 1);
    const bool low = order == Order::kRowColumn ? in_level(m, k, s) : in_level(k, m, s);
    const bool high = order == Order::kRowColumn ? in_level(m, k + 1, s) : in_level(k + 1, m, s);
    a[r] &= (low ? 0xffffU : 0U) | (high ? 0xffff0000U : 0U);
  }
}

// One level's sums for two neighbouring tiles, joined to the whole. acc_q holds, before the row's factor, dA
// k of upper rows; acc_k has dL b k of upper rows and dA^T q + (dL b)^T k of lower ones. What a pair adds to
// g between its rows is its product, with one sign at i and the other at j; both are formed from the same
// rounded operands, so outside of (j, i] they cancel to fp32 and not to bf16.
template <int kLevel>
__device__ void join_level(const GradientShared& shared, const WarpPlace& at, int n,
                           const float (&acc_q)[2][4], const float (&acc_k)[2][4], PairSums& sums) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const int row = at.row_of(c);
    const bool upper = (row & kLevel) != 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = at.column_of(n + j, c);
      const float2 G = *reinterpret_cast<const float2*>(shared.G + row * kRowFloats + column);
      const float2 reference =
          *reinterpret_cast<const float2*>(shared.G + level_reference(row, kLevel) * kRowFloats + column);
      const std::uint32_t q = tile_pair(shared.rows.q, row, at.piece + n + j, at.quad);
      const std::uint32_t k = tile_pair(shared.rows.k, row, at.piece + n + j, at.quad);
      const float span[2] = {G.x - reference.x, G.y - reference.y};
      const float q_pair[2] = {low_half(q), high_half(q)}, k_pair[2] = {low_half(k), high_half(k)};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = exp2_fast(upper ? span[e] : -span[e]);
        const float along_k = k_pair[e] * acc_k[j][c + e];
        sums.d_q[n + j][c + e] += factor * acc_q[j][c + e];
        sums.d_k[n + j][c + e] += factor * acc_k[j][c + e];
        sums.d_g[n + j][c + e] += q_pair[e] * acc_q[j][c + e] + (upper ? along_k : -along_k);
        if (upper) sums.d_beta[c / 2] += along_k;
      }
    }
  }
}

// The level's operands lie in shared.rows.
template <int kLevel>
__device__ void add_level(const GradientShared& shared, const WarpPlace& at, PairSums& sums) {
  constexpr bool kNear = kLevel < 16;  // both halves inside the warp's own rows
  constexpr int kSteps = kLevel == 32 ? 2 : 1;
  const bool upper = kNear || (at.row & kLevel) != 0, lower = kNear || !upper;
  int partner = at.row;
  if (kLevel == 16) partner = at.row ^ 16;
  if (kLevel == 32) partner = upper ? 0 : 32;
  std::uint32_t d_a[kSteps][4], d_l[kSteps][4], d_a_t[kSteps][4], d_l_t[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int other = partner + 16 * step;
    if (upper) {
      load_a<SquareTile>(d_a[step], shared.d_a, at.row, other / 8);
      load_a<SquareTile>(d_l[step], shared.d_lb, at.row, other / 8);
    }
    if (lower) {
      load_a_transposed<SquareTile>(d_a_t[step], shared.d_a, other, at.row / 8);
      load_a_transposed<SquareTile>(d_l_t[step], shared.d_lb, other, at.row / 8);
    }
    if (kNear) {
      keep_level(d_a[step], kLevel, Order::kRowColumn);
      keep_level(d_l[step], kLevel, Order::kRowColumn);
      keep_level(d_a_t[step], kLevel, Order::kColumnRow);
      keep_level(d_l_t[step], kLevel, Order::kColumnRow);
    }
  }
#pragma unroll
  for (int n = 0; n < 8; n += 2) {
    float acc_q[2][4] = {}, acc_k[2][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int other = partner + 16 * step;
      std::uint32_t k[4], q[4];
      load_b_transposed<WideTile>(k, shared.rows.k, other, at.piece + n);
      if (lower) load_b_transposed<WideTile>(q, shared.rows.q, other, at.piece + n);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (upper) {
          mma_bf16(acc_q[j], d_a[step], k[2 * j], k[2 * j + 1]);
          mma_bf16(acc_k[j], d_l[step], k[2 * j], k[2 * j + 1]);
        }
        if (lower) {
          mma_bf16(acc_k[j], d_a_t[step], q[2 * j], q[2 * j + 1]);
          mma_bf16(acc_k[j], d_l_t[step], k[2 * j], k[2 * j + 1]);
        }
      }
    }
    join_level<kLevel>(shared, at, n, acc_q, acc_k, sums);
  }
}

}  // namespace terrace::trainer::cuda
