// One block a chunk and value head. With D = e^G from the chunk's start, R to its end, in fp16:
//   A_ij = <q_i, k_j e^(G_i - G_j)>, i >= j     L_ij = b_i <k_i, k_j e^(G_i - G_j)>, i > j
//   M = (I + L)^-1    k D    k R    q D
// Warp w has rows 16 (w % 4) and channels 64 (w / 4); lane l of it rows l / 4 and l / 4 + 8 of these, and of
// a row two pieces of eight channels. As any order of channels will do in a product, what a lane holds of q
// and k is what operands A and B of the tensor cores want of it: products inside sixteen rows need no shared
// memory, and rows of other warps come from the lane of the same number.
//
// Pairs inside sixteen rows are split by level (kda_chunked.cuh); pairs of different sixteens have the upper
// one's first row as reference. All exponents are <= 0. Every number formed here is at most 1, M's included
// (a product of contractions between two unit keys), so fp16 holds them all to 2^-12 of the largest: for
// nearly equal keys L is all ones and M takes differences of neighbours, of which bf16 would leave little.
#include "examples/moe_trainer/ops/cuda/kda_chunked.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kPartRow = 24;            // floats: rows written side by side fall into different banks
constexpr int kPart = 16 * kPartRow;    // a block of (16, 16)
constexpr int kParts = 10;              // blocks on and below the diagonal
constexpr int kSolveRow = 20;           // floats
constexpr int kLaneBytes = kWarp * 16;  // of one 16-byte piece of every lane

struct Tiles {
  unsigned char a[kSquareTile], l[kSquareTile], inverse[kSquareTile];
};
struct Shared {
  float halves[2][kParts * kPart];  // of A and L: the other half of the channels
  float diagonal[4][16 * kSolveRow];
  union {
    unsigned char lower[8][4 * kLaneBytes];  // k e^(to the end of its sixteen rows), as lanes hold it
    Tiles tiles;
  };
  float totals[4][kChunkedWidth];  // log decay of sixteen rows
  float sums[3][2][kChunk];        // <q, q>, <k, k>, <q, k> of half the channels
};

struct Place {
  int block, half, group, quad;
  __device__ int row(int e) const { return 16 * block + group + 8 * e; }
  __device__ int piece(int p) const { return 8 * half + 4 * p + quad; }
};
__device__ Place place() {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) & 31;
  return {warp & 3, warp >> 2, lane >> 2, lane & 3};
}

// Pairs of channels of rows e = 0, 1: four of each piece.
struct LaneRows {
  std::uint32_t pair[2][8];
};
struct LanePieces {
  uint4 at[2][2];  // row, piece
};
__device__ LanePieces load(const std::uint16_t* from, const ChunkPlace& chunk, std::int64_t heads,
                           std::int64_t head, const Place& my) {
  const std::uint16_t* lane = from + row_offset(chunk, heads, head, my.row(0)) + 8 * my.piece(0);
  LanePieces out;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      out.at[e][p] = make_uint4(0, 0, 0, 0);
      if (my.row(e) < chunk.rows) out.at[e][p] = *reinterpret_cast<const uint4*>(lane + 32 * p);
    }
    lane += 8 * heads * kChunkedWidth;
  }
  return out;
}
// On the diagonals of 8 by 8 products: rows of q and of k times rows of q; rows of k times those of k.
__device__ void sum_squares(Shared& shared, const LanePieces& q, const LanePieces& k, const Place& my) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float by_q[4] = {}, by_k[4] = {};
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const uint4 &x = q.at[e][p], &y = k.at[e][p];
      mma_bf16(by_q, {x.x, y.x, x.y, y.y}, x.x, x.y);
      mma_bf16(by_q, {x.z, y.z, x.w, y.w}, x.z, x.w);
      mma_bf16(by_k, {x.x, y.x, x.y, y.y}, y.x, y.y);
      mma_bf16(by_k, {x.z, y.z, x.w, y.w}, y.z, y.w);
    }
    if (my.group / 2 == my.quad) {
      const bool odd = (my.group & 1) != 0;
      shared.sums[0][my.half][my.row(e)] = odd ? by_q[1] : by_q[0];
      shared.sums[1][my.half][my.row(e)] = odd ? by_k[3] : by_k[2];
      shared.sums[2][my.half][my.row(e)] = odd ? by_q[3] : by_q[2];
    }
  }
}
__device__ float sum_of(const Shared& shared, int which, int row) {
  return shared.sums[which][0][row] + shared.sums[which][1][row];
}
__device__ LaneRows unit_rows(const Shared& shared, const LanePieces& x, int which, float eps,
                              const Place& my) {
  LaneRows out;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float inverse = rsqrtf(sum_of(shared, which, my.row(e)) + eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4& piece = x.at[e][i / 4];
      out.pair[e][i] =
          pack_half(number(piece, 2 * (i % 4)) * inverse, number(piece, 2 * (i % 4) + 1) * inverse);
    }
  }
  return out;
}

// Products of the warp's own rows over its channels, a level each. Tiles of 8 by 8: rows of q, rows of k.
struct NearSums {
  float inside[3][2][4];  // levels 1, 2, 4; rows and columns 8 e
  float across[4];        // level 8: rows 8, columns 0
};
// Logs of decay: from a group's start through a row, and from there to the group's end.
struct LaneLogs {
  float through[2][8], left[2][8];
};

// Two steps of channels: factor, then multiply rows 8 `upper` by rows 8 `lower`.
__device__ void add_products(const LaneRows& q, const LaneRows& k, int first, int upper, int lower,
                             const std::uint32_t (&factor)[2][4], float (&acc)[4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    std::uint32_t a[4], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = 2 * step + i;
      a[2 * i] = multiply_halves(q.pair[upper][first + pair], factor[upper][pair]);
      a[2 * i + 1] = multiply_halves(k.pair[upper][first + pair], factor[upper][pair]);
      b[i] =
          upper == lower ? a[2 * i + 1] : multiply_halves(k.pair[lower][first + pair], factor[lower][pair]);
    }
    mma_half(acc, a, b[0], b[1]);
  }
}

// One piece of the lane's channels through all levels. Leaves the logs of sixteen rows.
__device__ void near_levels(const LaneRows& q, const LaneRows& k, int piece, const Place& my, LaneLogs& logs,
                            NearSums& sums) {
  std::uint32_t factor[2][4];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      const bool upper = (my.group & (1 << level)) != 0;
      const float if_upper = upper ? 1.0F : 0.0F, if_lower = 1.0F - if_upper;
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float &through = logs.through[e][c], &left = logs.left[e][c];
        x[c] = exp2_fast(upper ? through : left);
        const float other = __shfl_xor_sync(kFullWarp, level == 0 ? through : through + left, 4 << level);
        through += if_upper * other;
        left += if_lower * other;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) factor[e][i] = pack_half(x[2 * i], x[2 * i + 1]);
      add_products(q, k, 4 * piece, e, e, factor, sums.inside[level][e]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    factor[0][i] = pack_half(exp2_fast(logs.left[0][2 * i]), exp2_fast(logs.left[0][2 * i + 1]));
    factor[1][i] = pack_half(exp2_fast(logs.through[1][2 * i]), exp2_fast(logs.through[1][2 * i + 1]));
  }
  add_products(q, k, 4 * piece, 1, 0, factor, sums.across);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float low = logs.through[0][c] + logs.left[0][c], high = logs.through[1][c] + logs.left[1][c];
    logs.through[1][c] += low;
    logs.left[0][c] += high;
  }
}

// The lane's entries of the block on the diagonal, of A and L: rows g; g + 8; g + 8 and columns 8.
struct DiagonalSums {
  float pair[2][3][2];
};
__device__ DiagonalSums join_levels(const NearSums& sums, const Place& my) {
  DiagonalSums out;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 2 * my.quad + c;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = 0.0F;
#pragma unroll
        for (int level = 0; level < 3; ++level) {
          if (in_level(my.group, column, 1 << level)) x = sums.inside[level][e][2 * kind + c];
        }
        out.pair[kind][2 * e][c] = x;
      }
      out.pair[kind][1][c] = sums.across[2 * kind + c];
    }
  }
  return out;
}

// The log decays of one piece of channels, base 2.
__device__ void piece_logs(const GateOf& gate, const float* dt_bias, const LanePieces& z, int p,
                           const ChunkPlace& chunk, const Place& my, LaneLogs& logs) {
  float dt[8];
  load_eight(dt_bias + 8 * my.piece(p), dt);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float exists = my.row(e) < chunk.rows ? 1.0F : 0.0F;
    const GateOf of_row{exists * gate.rate, exists * gate.lower_bound, gate.gate};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      logs.through[e][c] = of_row.log2_decay(number(z.at[e][p], c) + dt[c]);
      logs.left[e][c] = 0.0F;
    }
  }
}

// Sum over blocks [first, last) of the piece's logs.
__device__ void add_totals(const Shared& shared, int piece, int first, int last, float (&to)[8]) {
  for (int block = first; block < last; ++block) {
    float x[8];
    load_eight(shared.totals[block] + 8 * piece, x);
#pragma unroll
    for (int c = 0; c < 8; ++c) to[c] += x[c];
  }
}

// q and k from the sixteen rows' start, operand A of later products; k to their end; and over the whole chunk
// q D, k D and k R, which go to scratch.
struct FarRows {
  LaneRows q, k;
};
__device__ FarRows decay_rows(const KdaChunked& a, std::int64_t tile, Shared& shared, const Place& my,
                              const LaneRows& q, const LaneRows& k, const float (&through)[2][2][8]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / kWarp;
  FarRows out;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    float own[8] = {}, before[8] = {}, after[8] = {};
    add_totals(shared, my.piece(p), my.block, my.block + 1, own);
    add_totals(shared, my.piece(p), 0, my.block, before);
    add_totals(shared, my.piece(p), my.block + 1, 4, after);
#pragma unroll
    for (int c = 0; c < 8; ++c) before[c] = exp2_fast(before[c]), after[c] = exp2_fast(after[c]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      std::uint32_t lower[4], q_start[4], k_start[4], k_end[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float start[2], end[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float log = through[p][e][2 * i + c];
          start[c] = exp2_fast(log);
          end[c] = exp2_fast(own[2 * i + c] - log);
        }
        const std::uint32_t q_pair = q.pair[e][4 * p + i], k_pair = k.pair[e][4 * p + i];
        const std::uint32_t near = pack_half(start[0], start[1]);
        out.q.pair[e][4 * p + i] = multiply_halves(q_pair, near);
        out.k.pair[e][4 * p + i] = multiply_halves(k_pair, near);
        lower[i] = multiply_halves(k_pair, pack_half(end[0], end[1]));
        const std::uint32_t first = pack_half(start[0] * before[2 * i], start[1] * before[2 * i + 1]);
        q_start[i] = multiply_halves(q_pair, first);
        k_start[i] = multiply_halves(k_pair, first);
        k_end[i] = multiply_halves(k_pair, pack_half(end[0] * after[2 * i], end[1] * after[2 * i + 1]));
      }
      const std::int64_t place = tile * kWideTile + WideTile::at(my.row(e), my.piece(p));
      *reinterpret_cast<uint4*>(a.from_start + place) = as_piece(q_start);
      *reinterpret_cast<uint4*>(a.key_start + place) = as_piece(k_start);
      *reinterpret_cast<uint4*>(a.to_end + place) = as_piece(k_end);
      *reinterpret_cast<uint4*>(shared.lower[warp] + (2 * e + p) * kLaneBytes + 16 * lane) = as_piece(lower);
    }
  }
  return out;
}

using FarSums = float[2][4];  // (16, 16): columns 8 n
// What a half of the warps finishes, and gives the other: half 0 finishes A, half 1 L.
enum class Kind : std::uint8_t { kA, kL };

__device__ float* part_of(Shared& shared, Kind kind, int row_block, int column_block) {
  return shared.halves[static_cast<int>(kind)] + (row_block * (row_block + 1) / 2 + column_block) * kPart;
}
__device__ float2* part_pair(float* part, const Place& my, int e, int n) {
  return reinterpret_cast<float2*>(part + (my.group + 8 * e) * kPartRow + 8 * n + 2 * my.quad);
}

// The warp's rows times those of an earlier sixteen, between which lie the blocks whose logs `between` sums.
__device__ void far_block(const Shared& shared, const Place& my, const FarRows& far, int block,
                          float (&between)[2][8], FarSums& a_sum, FarSums& l_sum) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    if (block + 1 < my.block) add_totals(shared, my.piece(p), block + 1, block + 2, between[p]);
    LaneRows k;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint4 piece = *reinterpret_cast<const uint4*>(shared.lower[block + 4 * my.half] +
                                                          (2 * e + p) * kLaneBytes + 16 * lane);
      k.pair[e][0] = piece.x, k.pair[e][1] = piece.y, k.pair[e][2] = piece.z, k.pair[e][3] = piece.w;
    }
    if (block + 1 < my.block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t factor =
            pack_half(exp2_fast(between[p][2 * i]), exp2_fast(between[p][2 * i + 1]));
        k.pair[0][i] = multiply_halves(k.pair[0][i], factor);
        k.pair[1][i] = multiply_halves(k.pair[1][i], factor);
      }
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int i = 4 * p + 2 * step;
      const std::uint32_t q_rows[4] = {far.q.pair[0][i], far.q.pair[1][i], far.q.pair[0][i + 1],
                                       far.q.pair[1][i + 1]};
      const std::uint32_t k_rows[4] = {far.k.pair[0][i], far.k.pair[1][i], far.k.pair[0][i + 1],
                                       far.k.pair[1][i + 1]};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        mma_half(a_sum[n], q_rows, k.pair[n][2 * step], k.pair[n][2 * step + 1]);
        mma_half(l_sum[n], k_rows, k.pair[n][2 * step], k.pair[n][2 * step + 1]);
      }
    }
  }
}

// What the warp keeps of its row of blocks: far[i] is block `my.block - 1 - i`.
struct Kept {
  FarSums far[3];
  float diagonal[3][2];
};
__device__ Kind given_by(const Place& my) { return my.half == 0 ? Kind::kL : Kind::kA; }
__device__ void exchange_diagonal(Shared& shared, const Place& my, const DiagonalSums& sums, Kept& kept) {
  float* part = part_of(shared, given_by(my), my.block, my.block);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const float(&a_pair)[2] = sums.pair[0][i], (&l_pair)[2] = sums.pair[1][i];
    *part_pair(part, my, i > 0 ? 1 : 0, i > 1 ? 1 : 0) =
        my.half == 0 ? make_float2(l_pair[0], l_pair[1]) : make_float2(a_pair[0], a_pair[1]);
#pragma unroll
    for (int c = 0; c < 2; ++c) kept.diagonal[i][c] = my.half == 0 ? a_pair[c] : l_pair[c];
  }
}
__device__ void exchange_far(Shared& shared, const Place& my, const FarRows& rows, Kept& kept) {
  float between[2][8] = {};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int block = my.block - 1 - i;
    if (block < 0) break;
    FarSums a_sum = {}, l_sum = {};
    far_block(shared, my, rows, block, between, a_sum, l_sum);
    float* part = part_of(shared, given_by(my), my.block, block);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 of_a = make_float2(a_sum[n][2 * e], a_sum[n][2 * e + 1]);
        const float2 of_l = make_float2(l_sum[n][2 * e], l_sum[n][2 * e + 1]);
        *part_pair(part, my, e, n) = my.half == 0 ? of_l : of_a;
        kept.far[i][n][2 * e] = my.half == 0 ? of_a.x : of_l.x;
        kept.far[i][n][2 * e + 1] = my.half == 0 ? of_a.y : of_l.y;
      }
    }
  }
}

__device__ void store_halves(unsigned char* tile, int row, int piece, int quad, float low, float high) {
  *reinterpret_cast<std::uint32_t*>(tile + SquareTile::at(row, piece) + 4 * quad) = pack_half(low, high);
}

// The two halves of a far block, summed and times a factor a row, to a tile.
__device__ void finish_far(Shared& shared, const Place& my, Kind kind, const Kept& kept,
                           const float (&factor)[2], unsigned char* tile) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int block = my.block - 1 - i;
    if (block < 0) break;
    float* part = part_of(shared, kind, my.block, block);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float2 other = *part_pair(part, my, e, n);
        store_halves(tile, my.row(e), 2 * block + n, my.quad, factor[e] * (kept.far[i][n][2 * e] + other.x),
                     factor[e] * (kept.far[i][n][2 * e + 1] + other.y));
      }
    }
  }
}
__device__ void finish_a(const KdaChunked& a, Shared& shared, const Place& my, const Kept& kept) {
  finish_far(shared, my, Kind::kA, kept, {1.0F, 1.0F}, shared.tiles.a);
  float* part = part_of(shared, Kind::kA, my.block, my.block);
  store_halves(shared.tiles.a, my.row(0), 2 * my.block + 1, my.quad, 0.0F, 0.0F);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int e = i > 0 ? 1 : 0, n = i > 1 ? 1 : 0, row = my.row(e);
    const float2 other = *part_pair(part, my, e, n);
    float x[2] = {kept.diagonal[i][0] + other.x, kept.diagonal[i][1] + other.y};
    if (i != 1 && my.group / 2 == my.quad) {  // <q_i, k_i>: no decay
      x[my.group & 1] = sum_of(shared, 2, row) * rsqrtf(sum_of(shared, 0, row) + a.l2_eps) *
                        rsqrtf(sum_of(shared, 1, row) + a.l2_eps);
    }
    store_halves(shared.tiles.a, row, 2 * my.block + n, my.quad, x[0], x[1]);
  }
}

// L, and the inverse of its block on the diagonal by substitution in fp32: a lane a column.
__device__ void finish_l(Shared& shared, const Place& my, const Kept& kept, const float (&beta)[2]) {
  finish_far(shared, my, Kind::kL, kept, beta, shared.tiles.l);
  float* part = part_of(shared, Kind::kL, my.block, my.block);
  float* L = shared.diagonal[my.block];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int e = i > 0 ? 1 : 0, n = i > 1 ? 1 : 0;
    const float2 other = *part_pair(part, my, e, n);
    *reinterpret_cast<float2*>(L + (my.group + 8 * e) * kSolveRow + 8 * n + 2 * my.quad) =
        make_float2(beta[e] * (kept.diagonal[i][0] + other.x), beta[e] * (kept.diagonal[i][1] + other.y));
  }
  __syncwarp();
  const int column = static_cast<int>(threadIdx.x) & 15, first = 16 * my.block;
  const bool stores = (threadIdx.x & 16) == 0;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 l = *reinterpret_cast<const float4*>(L + i * kSolveRow + m);
      x[i] -= l.x * x[m];
      if (m + 1 < i) x[i] -= l.y * x[m + 1];
      if (m + 2 < i) x[i] -= l.z * x[m + 2];
      if (m + 3 < i) x[i] -= l.w * x[m + 3];
    }
    if (stores) {
      *reinterpret_cast<std::uint16_t*>(shared.tiles.inverse +
                                        SquareTile::at(first + i, (first + column) / 8) + 2 * (column % 8)) =
          static_cast<std::uint16_t>(pack_half(x[i], 0.0F));
    }
  }
}

// M21 = -(M22 L21) M11, of kBlocks sixteens of rows and columns from `top` and the same below them: a warp
// the sixteen rows `own` of the lower ones.
template <int kBlocks>
__device__ void merge(Tiles& tiles, int top, int own) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int middle = top + 16 * kBlocks, row = middle + 16 * own;
  float left[2 * kBlocks][4] = {}, out[2 * kBlocks][4] = {};
#pragma unroll
  for (int step = 0; step < kBlocks; ++step) {
    if (step > own) break;
    std::uint32_t a[4], b[4];
    load_a<SquareTile>(a, tiles.inverse, row, middle / 8 + 2 * step);
#pragma unroll
    for (int n = 0; n < 2 * kBlocks; n += 2) {
      load_b_transposed<SquareTile>(b, tiles.l, middle + 16 * step, top / 8 + n);
      mma_half(left[n], a, b[0], b[1]);
      mma_half(left[n + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int step = 0; step < kBlocks; ++step) {
    std::uint32_t a[4], b[4];
    as_half_operand(left[2 * step], left[2 * step + 1], a);
#pragma unroll
    for (int n = 0; n <= 2 * step; n += 2) {
      load_b_transposed<SquareTile>(b, tiles.inverse, top + 16 * step, top / 8 + n);
      mma_half(out[n], a, b[0], b[1]);
      mma_half(out[n + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2 * kBlocks; ++n) {
    store_halves(tiles.inverse, row + lane / 4, top / 8 + n, lane & 3, -out[n][0], -out[n][1]);
    store_halves(tiles.inverse, row + lane / 4 + 8, top / 8 + n, lane & 3, -out[n][2], -out[n][3]);
  }
}

__device__ void finish_chunk(const KdaChunked& a, std::int64_t tile, Shared& shared, const Place& my,
                             const Kept& kept, const float (&beta)[2]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (my.half == 0) {
    finish_a(a, shared, my, kept);
  } else {
    finish_l(shared, my, kept, beta);
  }
  __syncthreads();
  if (warp < 2) merge<1>(shared.tiles, 32 * warp, 0);
  copy_tile<kSquareTile, kChunkThreads>(shared.tiles.a, a.a + tile * kSquareTile);
  __syncthreads();
  if (warp < 2) merge<2>(shared.tiles, 0, warp);
  __syncthreads();
  copy_tile<kSquareTile, kChunkThreads>(shared.tiles.inverse, a.solve + tile * kSquareTile);
}

template <KdaGate kGate>
__global__ void __launch_bounds__(kChunkThreads, 2) kda_prepare_chunks(KdaChunked a) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(kda_shared);
  const int t = static_cast<int>(threadIdx.x);
  const ChunkPlace chunk = chunk_place(a, a.first + blockIdx.y);
  if (chunk.rows == 0) return;
  const std::int64_t head = blockIdx.x, tile = std::int64_t{blockIdx.y} * a.value_heads + head;
  const std::int64_t key_head = blockIdx.x / static_cast<std::uint32_t>(a.group);
  const Place my = place();
  const LanePieces q_given = load(a.q, chunk, a.key_heads, key_head, my);
  const LanePieces k_given = load(a.k, chunk, a.key_heads, key_head, my);
  const LanePieces z = load(a.z, chunk, a.value_heads, head, my);
  const float beta[2] = {beta_of(a, chunk, head, my.row(0)), beta_of(a, chunk, head, my.row(1))};
  sum_squares(shared, q_given, k_given, my);
  __syncthreads();
  const LaneRows q = unit_rows(shared, q_given, 0, a.l2_eps, my);
  const LaneRows k = unit_rows(shared, k_given, 1, a.l2_eps, my);
  const GateOf gate{expf(a.a_log[head]), a.lower_bound, kGate};
  float through[2][2][8];  // piece, row
  NearSums sums = {};
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    LaneLogs logs;
    piece_logs(gate, a.dt_bias + head * kChunkedWidth, z, p, chunk, my, logs);
    near_levels(q, k, p, my, logs, sums);
    float whole[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) whole[c] = logs.through[0][c] + logs.left[0][c];
    if (my.group == 0) store_eight(shared.totals[my.block] + 8 * my.piece(p), whole);
#pragma unroll
    for (int c = 0; c < 8; ++c) through[p][0][c] = logs.through[0][c], through[p][1][c] = logs.through[1][c];
  }
  Kept kept;
  exchange_diagonal(shared, my, join_levels(sums, my), kept);
  __syncthreads();
  if (t < kChunkedWidth) {
    a.decay[tile * kDecayFloats + t] =
        exp2_fast((shared.totals[0][t] + shared.totals[1][t]) + (shared.totals[2][t] + shared.totals[3][t]));
  }
  if (my.half == 0 && my.quad == 0) {
#pragma unroll
    for (int e = 0; e < 2; ++e) a.decay[tile * kDecayFloats + kChunkedWidth + my.row(e)] = beta[e];
  }
  const FarRows far = decay_rows(a, tile, shared, my, q, k, through);
  __syncthreads();
  exchange_far(shared, my, far, kept);
  __syncthreads();
  finish_chunk(a, tile, shared, my, kept, beta);
}

}  // namespace

void prepare_chunks(OpCall& call, const KdaChunked& chunked) {
  const Grid grid{
      .x = chunked.value_heads, .y = chunked.count, .threads = kChunkThreads, .shared_bytes = sizeof(Shared)};
  if (chunked.gate == KdaGate::kLowerBound) {
    call.launch(kda_prepare_chunks<KdaGate::kLowerBound>, grid, chunked);
  } else {
    call.launch(kda_prepare_chunks<KdaGate::kSoftplus>, grid, chunked);
  }
}

}  // namespace terrace::trainer::cuda
