// The pairs (i, j) inside a chunk, of the gradients (kda_chunk_gradients.cu): with dA and b dL below the
// diagonal,
//   dq_i += sum_j dA_ij k_j E_ij                dk_i += sum_j (b dL)_ij k_j E_ij
//   dk_j += sum_i (dA_ij q_i + (b dL)_ij k_i) E_ij
// Pairs go in steps, each with one reference row between its i and its j: the levels 32 and 16, then the
// 16-row blocks on the diagonal. Inside such a block the reference is its eighth row and factors may exceed
// one; where a gate decays so fast that they could overflow, levels 8 .. 1 take its place.
//
// For nearly equal keys with b near 1 the sums over rows telescope: dA, dL, k as j and q are pairs of bf16
// numbers, the second what rounding left of the first. The product of two rests is left out.
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
  unsigned char q_later[kWideTile], k_later[kWideTile], k_earlier[kWideTile], q_rest[kWideTile];
};
// What rounding left of dA, of b dL, and of a step's k_earlier.
struct RestTiles {
  unsigned char d_a[kSquareTile], d_lb[kSquareTile], k_earlier[kWideTile];
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
  union {
    RestTiles rests;
    float after[kChunk * kRowFloats];  // goes to g of this row and of earlier ones; then dg, then sums of dz
  };
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
        store_both<WideTile>(shared.step.q_later, shared.step.q_rest, row, at.piece + n,
                             q_inverse * low_half(q_pair) * later[0],
                             q_inverse * high_half(q_pair) * later[1]);
        store_pair<WideTile>(shared.step.k_later, row, at.piece + n, k[0] * later[0], k[1] * later[1]);
      }
      if (kInBlock || !far || !upper) {
        store_both<WideTile>(shared.step.k_earlier, shared.rests.k_earlier, row, at.piece + n,
                             k[0] * earlier[0], k[1] * earlier[1]);
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
// formed from the same rounded operands, so outside of (j, i] they cancel far below bf16.
__device__ inline float2 both_parts(std::uint32_t pair, std::uint32_t rest) {
  return make_float2(low_half(pair) + low_half(rest), high_half(pair) + high_half(rest));
}
__device__ inline void join_later_q(const PairShared& shared, const WarpPlace& at, const Tiles& acc,
                                    const Tiles& factors, PairSums& sums) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
#pragma unroll
    for (int n = 0; n < kPairPieces; ++n) {
      const float2 q = both_parts(tile_pair(shared.step.q_later, at.row_of(c), at.piece + n, at.quad),
                                  tile_pair(shared.step.q_rest, at.row_of(c), at.piece + n, at.quad));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sums.d_q[n][c + e] += factors[n][c + e] * acc[n][c + e];
        sums.d_g[n][c + e] += (e == 0 ? q.x : q.y) * acc[n][c + e];
      }
    }
  }
}
__device__ inline void join_later_k(const PairShared& shared, const WarpPlace& at, const Tiles& acc,
                                    const Tiles& factors, PairSums& sums) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
#pragma unroll
    for (int n = 0; n < kPairPieces; ++n) {
      const std::uint32_t k = tile_pair(shared.step.k_later, at.row_of(c), at.piece + n, at.quad);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float along = (e == 0 ? low_half(k) : high_half(k)) * acc[n][c + e];
        sums.d_k[n][c + e] += factors[n][c + e] * acc[n][c + e];
        sums.d_g[n][c + e] += along;
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
      const float2 k = both_parts(tile_pair(shared.step.k_earlier, at.row_of(c), at.piece + n, at.quad),
                                  tile_pair(shared.rests.k_earlier, at.row_of(c), at.piece + n, at.quad));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = factors[n][c + e];
        sums.d_k[n][c + e] += (step == kBlock ? reciprocal_fast(factor) : factor) * acc[n][c + e];
        sums.d_g[n][c + e] -= (e == 0 ? k.x : k.y) * acc[n][c + e];
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
// Operand A of sixteen rows of dA or b dL, and its rest.
struct PairOperand {
  std::uint32_t high[4], rest[4];
};
__device__ inline PairOperand pair_operand(const unsigned char* tile, const unsigned char* rest, int row,
                                           int other, int step, Order order) {
  PairOperand out;
  if (order == Order::kRowColumn) {
    load_a<SquareTile>(out.high, tile, row, other / 8);
    load_a<SquareTile>(out.rest, rest, row, other / 8);
  } else {
    load_a_transposed<SquareTile>(out.high, tile, other, row / 8);
    load_a_transposed<SquareTile>(out.rest, rest, other, row / 8);
  }
  if (step < 16 && step != kBlock) {
    keep_level(out.high, step, order);
    keep_level(out.rest, step, order);
  }
  return out;
}
// acc += a times sixteen rows from `other`; or its high part times their rest.
__device__ inline void add_rows(const PairOperand& a, const unsigned char* rows, const WarpPlace& at,
                                int other, Tiles& acc) {
#pragma unroll
  for (int n = 0; n < kPairPieces; n += 2) {
    std::uint32_t b[4];
    load_b_transposed<WideTile>(b, rows, other, at.piece + n);
    mma_bf16(acc[n], a.high, b[0], b[1]);
    mma_bf16(acc[n + 1], a.high, b[2], b[3]);
    mma_bf16(acc[n], a.rest, b[0], b[1]);
    mma_bf16(acc[n + 1], a.rest, b[2], b[3]);
  }
}
__device__ inline void add_rests(const PairOperand& a, const unsigned char* rests, const WarpPlace& at,
                                 int other, Tiles& acc) {
#pragma unroll
  for (int n = 0; n < kPairPieces; n += 2) {
    std::uint32_t b[4];
    load_b_transposed<WideTile>(b, rests, other, at.piece + n);
    mma_bf16(acc[n], a.high, b[0], b[1]);
    mma_bf16(acc[n + 1], a.high, b[2], b[3]);
  }
}
// acc += rows of dA or b dL times k as j.
__device__ inline void add_later(const unsigned char* tile, const unsigned char* rest,
                                 const PairShared& shared, const WarpPlace& at, const Partners& partners,
                                 int step, Tiles& acc) {
#pragma unroll 1
  for (int other = partners.first; other < partners.first + 16 * partners.count; other += 16) {
    const PairOperand a = pair_operand(tile, rest, at.row, other, step, Order::kRowColumn);
    add_rows(a, shared.step.k_earlier, at, other, acc);
    add_rests(a, shared.rests.k_earlier, at, other, acc);
  }
}
// acc += columns of dA times q, and of b dL times k, as i.
__device__ inline void add_earlier(const PairShared& shared, const WarpPlace& at, const Partners& partners,
                                   int step, Tiles& acc) {
#pragma unroll 1
  for (int other = partners.first; other < partners.first + 16 * partners.count; other += 16) {
    const PairOperand d_a =
        pair_operand(shared.d_a, shared.rests.d_a, at.row, other, step, Order::kColumnRow);
    add_rows(d_a, shared.step.q_later, at, other, acc);
    add_rests(d_a, shared.step.q_rest, at, other, acc);
    const PairOperand d_l =
        pair_operand(shared.d_lb, shared.rests.d_lb, at.row, other, step, Order::kColumnRow);
    add_rows(d_l, shared.step.k_later, at, other, acc);
  }
}
__device__ inline void add_step(const PairShared& shared, const WarpPlace& at, int step, const Tiles& factors,
                                PairSums& sums) {
  const Partners partners = partners_of(at.row, step);
  if (partners.later) {
    {
      Tiles acc = {};
      add_later(shared.d_a, shared.rests.d_a, shared, at, partners, step, acc);
      join_later_q(shared, at, acc, factors, sums);
    }
    Tiles acc = {};
    add_later(shared.d_lb, shared.rests.d_lb, shared, at, partners, step, acc);
    join_later_k(shared, at, acc, factors, sums);
  }
  if (partners.earlier) {
    Tiles acc = {};
    add_earlier(shared, at, partners, step, acc);
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
