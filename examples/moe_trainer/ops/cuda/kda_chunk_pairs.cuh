// The pairs (i, j) inside a chunk, of the gradients (kda_chunk_gradients.cu): with dA and b dL below the
// diagonal,
//   dq_i += sum_j dA_ij k_j E_ij                dk_i += sum_j (b dL)_ij k_j E_ij
//   dk_j += sum_i (dA_ij q_i + (b dL)_ij k_i) E_ij
// Pairs go in steps, each with one reference row between its i and its j: the levels 32 and 16, then the
// 16-row blocks on the diagonal. Inside such a block the reference is its eighth row and factors may exceed
// one; where a gate decays so fast that they could overflow, levels 8 .. 1 take its place.
//
// Warp w has rows 16 (w % 4) and columns 32 (w / 4) of the (64, 128) results.
#pragma once

#include "examples/moe_trainer/ops/cuda/kda_chunk_gradients.cuh"

namespace terrace::trainer::cuda {

inline constexpr int kPairThreads = 512;
inline constexpr int kPairPieces = 4;        // a warp's columns
inline constexpr float kWidestSpan = 64.0F;  // base 2, from a block's eighth row to its ends
// The steps besides the levels: all pairs of a block; none.
inline constexpr int kBlock = 0, kDone = -1;

using Tiles = float[kPairPieces][4];
struct PairSums {
  Tiles d_q, d_k, d_g;
  float d_beta[2];  // b times it, of rows g and g + 8
};

// A step's operands: rows times their factors as i, and as j.
struct StepTiles {
  unsigned char q_later[kWideTile], k_later[kWideTile], k_earlier[kWideTile];
};
// The members of a union follow one another in time.
struct PairShared {
  unsigned char q[kWideTile], k[kWideTile];  // as given
  union {
    StepTiles step;
    float d_q[kChunk * kRowFloats];
  };
  unsigned char d_a[kSquareTile], d_lb[kSquareTile];
  union {
    float G[kChunk * kRowFloats];
    float d_k[kChunk * kRowFloats];
  };
  float after[kChunk * kRowFloats];   // goes to g of this row and of earlier ones; then dg, then sums of dz
  float before[kChunk * kRowFloats];  // goes to g of later rows; then sums of dA's terms
  float beta[kChunk], q_inverse[kChunk], k_inverse[kChunk], along_v[kChunk], diagonal[kChunk];
  float d_beta[4][kChunk];  // of each quarter of the columns
  float through[kChunkedWidth], totals[8][kChunkedWidth];
  hopper::Barrier full;
};
static_assert(sizeof(PairShared) <= 227 * 1024);

__device__ inline std::uint32_t tile_pair(const unsigned char* tile, int row, int piece, int quad) {
  return *reinterpret_cast<const std::uint32_t*>(tile + WideTile::at(row, piece) + 4 * quad);
}
// The row that e^(G_i - G_j) is split at.
__device__ inline int reference_row(int row, int step) {
  return step == kBlock ? (row & ~15) + 7 : level_reference(row, step);
}
// The step's operands: rows times their factors. At a level a row is i or j and has one factor, at most 1; a
// near level stores it in both parts, for masks to choose, a far one leaves alone what no warp will read.
// factors: those of rows as i; as j they are the same at a level and the inverse in a block.
enum class Split : std::uint8_t { kLevel, kBlock };
template <Split kSplit>
__device__ void scale_rows(const WarpPlace& at, int step, float scale, PairShared& shared, Tiles& factors) {
  constexpr bool kInBlock = kSplit == Split::kBlock;
  const bool far = step >= 16, upper = (at.row & step) != 0;
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const int row = at.row_of(c);
    const float* reference_G = shared.G + reference_row(row, step) * kRowFloats;
    const float q_inverse = shared.q_inverse[row] * scale, k_inverse = shared.k_inverse[row];
#pragma unroll
    for (int n = 0; n < kPairPieces; ++n) {
      const int column = at.column_of(n);
      const float2 G = *reinterpret_cast<const float2*>(shared.G + row * kRowFloats + column);
      const float2 reference = *reinterpret_cast<const float2*>(reference_G + column);
      const float span[2] = {G.x - reference.x, G.y - reference.y};
      const std::uint32_t k_pair = tile_pair(shared.k, row, at.piece + n, at.quad);
      const float k[2] = {k_inverse * low_half(k_pair), k_inverse * high_half(k_pair)};
      float earlier[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        factors[n][c + e] = exp2_fast(kInBlock ? span[e] : -fabsf(span[e]));
        earlier[e] = kInBlock ? exp2_fast(-span[e]) : factors[n][c + e];
      }
      if (kInBlock || !far || upper) {
        const std::uint32_t q_pair = tile_pair(shared.q, row, at.piece + n, at.quad);
        const float later[2] = {factors[n][c], factors[n][c + 1]};
        store_pair<WideTile>(shared.step.q_later, row, at.piece + n, q_inverse * low_half(q_pair) * later[0],
                             q_inverse * high_half(q_pair) * later[1]);
        store_pair<WideTile>(shared.step.k_later, row, at.piece + n, k[0] * later[0], k[1] * later[1]);
      }
      if (kInBlock || !far || !upper) {
        store_pair<WideTile>(shared.step.k_earlier, row, at.piece + n, k[0] * earlier[0], k[1] * earlier[1]);
      }
    }
  }
}

// Operand A of a 16-row block on the diagonal: element (m, k), or (k, m) of its transpose, kept where that
// pair is in the level.
enum class Order : std::uint8_t { kRowColumn, kColumnRow };
__device__ inline void keep_level(std::uint32_t (&a)[4], int s, Order order) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto kept = [s, order](int m, int k) {
    return order == Order::kRowColumn ? in_level(m, k, s) : in_level(k, m, s);
  };
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int m = (lane >> 2) + 8 * (r & 1), k = 2 * (lane & 3) + 8 * (r >> 1);
    a[r] &= (kept(m, k) ? 0xffffU : 0U) | (kept(m, k + 1) ? 0xffff0000U : 0U);
  }
}

// What a pair adds to g between its rows is its product, with one sign at i and the other at j; both are
// formed from the same rounded operands, so outside of (j, i] they cancel to fp32 and not to bf16.
__device__ inline void join_later(const PairShared& shared, const WarpPlace& at, const Tiles& acc_q,
                                  const Tiles& acc_k, const Tiles& factors, PairSums& sums) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
#pragma unroll
    for (int n = 0; n < kPairPieces; ++n) {
      const std::uint32_t q = tile_pair(shared.step.q_later, at.row_of(c), at.piece + n, at.quad);
      const std::uint32_t k = tile_pair(shared.step.k_later, at.row_of(c), at.piece + n, at.quad);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = factors[n][c + e];
        const float along = (e == 0 ? low_half(k) : high_half(k)) * acc_k[n][c + e];
        sums.d_q[n][c + e] += factor * acc_q[n][c + e];
        sums.d_k[n][c + e] += factor * acc_k[n][c + e];
        sums.d_g[n][c + e] += (e == 0 ? low_half(q) : high_half(q)) * acc_q[n][c + e] + along;
        sums.d_beta[c / 2] += along;
      }
    }
  }
}
__device__ inline void join_earlier(const PairShared& shared, const WarpPlace& at, int step, const Tiles& acc,
                                    const Tiles& factors, PairSums& sums) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
#pragma unroll
    for (int n = 0; n < kPairPieces; ++n) {
      const std::uint32_t k = tile_pair(shared.step.k_earlier, at.row_of(c), at.piece + n, at.quad);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = factors[n][c + e];
        sums.d_k[n][c + e] += (step == kBlock ? reciprocal_fast(factor) : factor) * acc[n][c + e];
        sums.d_g[n][c + e] -= (e == 0 ? low_half(k) : high_half(k)) * acc[n][c + e];
      }
    }
  }
}

// The sixteen-row blocks that the warp's rows meet in a step: `count` of them from row `first`.
struct Partners {
  bool later, earlier;
  int first, count;
};
__device__ inline Partners partners_of(int row, int step) {
  if (step < 16) return {true, true, row, 1};
  const bool upper = (row & step) != 0;
  if (step == 16) return {upper, !upper, row ^ 16, 1};
  return {upper, !upper, upper ? 0 : 32, 2};
}
// acc += a times sixteen rows from `other`.
__device__ inline void add_rows(const std::uint32_t (&a)[4], const unsigned char* rows, const WarpPlace& at,
                                int other, Tiles& acc) {
#pragma unroll
  for (int n = 0; n < kPairPieces; n += 2) {
    std::uint32_t b[4];
    load_b_transposed<WideTile>(b, rows, other, at.piece + n);
    mma_bf16(acc[n], a, b[0], b[1]);
    mma_bf16(acc[n + 1], a, b[2], b[3]);
  }
}
__device__ inline void add_step(const PairShared& shared, const WarpPlace& at, int step, const Tiles& factors,
                                PairSums& sums) {
  const Partners partners = partners_of(at.row, step);
  const bool masked = step < 16 && step != kBlock;
  if (partners.later) {
    Tiles acc_q = {}, acc_k = {};
#pragma unroll 1
    for (int other = partners.first; other < partners.first + 16 * partners.count; other += 16) {
      std::uint32_t d_a[4], d_l[4];
      load_a<SquareTile>(d_a, shared.d_a, at.row, other / 8);
      load_a<SquareTile>(d_l, shared.d_lb, at.row, other / 8);
      if (masked) {
        keep_level(d_a, step, Order::kRowColumn);
        keep_level(d_l, step, Order::kRowColumn);
      }
      add_rows(d_a, shared.step.k_earlier, at, other, acc_q);
      add_rows(d_l, shared.step.k_earlier, at, other, acc_k);
    }
    join_later(shared, at, acc_q, acc_k, factors, sums);
  }
  if (partners.earlier) {
    Tiles acc = {};
#pragma unroll 1
    for (int other = partners.first; other < partners.first + 16 * partners.count; other += 16) {
      std::uint32_t d_a[4], d_l[4];
      load_a_transposed<SquareTile>(d_a, shared.d_a, other, at.row / 8);
      load_a_transposed<SquareTile>(d_l, shared.d_lb, other, at.row / 8);
      if (masked) {
        keep_level(d_a, step, Order::kColumnRow);
        keep_level(d_l, step, Order::kColumnRow);
      }
      add_rows(d_a, shared.step.q_later, at, other, acc);
      add_rows(d_l, shared.step.k_later, at, other, acc);
    }
    join_earlier(shared, at, step, acc, factors, sums);
  }
}
__device__ inline int next_step(int step, bool wide) {
  if (step == 16 && !wide) return kBlock;
  return step <= 1 ? kDone : step / 2;
}
__device__ inline void add_pairs(PairShared& shared, const WarpPlace& at, float scale, bool wide,
                                 PairSums& sums) {
  Tiles factors = {};
#pragma unroll 1
  for (int step = kChunk / 2; step != kDone; step = next_step(step, wide)) {
    __syncthreads();
    if (step == kBlock) {
      scale_rows<Split::kBlock>(at, step, scale, shared, factors);
    } else {
      scale_rows<Split::kLevel>(at, step, scale, shared, factors);
    }
    __syncthreads();
    add_step(shared, at, step, factors, sums);
  }
  __syncthreads();
}

}  // namespace terrace::trainer::cuda
