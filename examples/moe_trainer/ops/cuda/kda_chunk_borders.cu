// One block a chunk and value head: what the walks left. Letters as in docs/OPERATORS.md, q with the scale,
// dvb the gradient through the solve; `out` of this kernel in scratch is KdaBorders:
//   dA = tril(do vn^T)    dL = -stril(dvb vn^T)    do S^T    -dvb S^T    vn dS'^T    rowsum(S dS')
//   <dvb, v>    dv = b dvb
// Products follow one another, each with an accumulator of at most 8 tiles a thread, and no warp waits for
// another. Two blocks share a multiprocessor: one computes while the other waits for memory.
#include "examples/moe_trainer/ops/cuda/kda_chunk_gradients.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kPieces = 8;           // a warp's columns
constexpr float kSmallest = 1e-33F;  // its inverse times 32767 is finite
constexpr std::uint32_t kInfinite = 0x7f800000U, kNotANumber = 0x7fc00000U;
using RowTiles = float[kPieces][4];
using SquareTiles = float[kPieces / 2][4];

// The members of a union follow one another in time.
struct Shared {
  unsigned char state[kStateTile];  // S
  union {
    unsigned char vn_rest[kWideTile];
    unsigned char d_state[kStateTile];  // dS'
  };
  union {
    unsigned char d_o[kWideTile];
    unsigned char vn_rest_again[kWideTile];
  };
  unsigned char d_vb[kWideTile], vn[kWideTile];
  float beta[kChunk];
  hopper::Barrier rows, before, after, again;  // vn, its rest and dvb; S; dS'; the rest again
};
static_assert(2 * (sizeof(Shared) + 1024) <= 228 * 1024);

__device__ void request_tiles(const KdaChunked& a, std::int64_t tile, Shared& shared) {
  shared.rows.init(1);
  shared.before.init(1);
  shared.after.init(1);
  shared.again.init(1);
  hopper::fence_barrier_init();
  shared.rows.arrive_expecting(3 * kWideTile);
  load_bulk(shared.vn, a.vn + tile * kWideTile, kWideTile, &shared.rows);
  load_bulk(shared.vn_rest, a.vn_rest + tile * kWideTile, kWideTile, &shared.rows);
  load_bulk(shared.d_vb, a.d_vb + tile * kWideTile, kWideTile, &shared.rows);
  shared.before.arrive_expecting(kStateTile);
  load_bulk(shared.state, a.state + tile * kStateTile, kStateTile, &shared.before);
}
// By one thread, when all have read what lies in the tile's place.
__device__ void request_tile(void* place, const unsigned char* from, std::uint32_t bytes,
                             hopper::Barrier& full) {
  hopper::fence_shared_for_async();
  full.arrive_expecting(bytes);
  load_bulk(place, from, bytes, &full);
}

// acc += left (64, 128) times state (128, 128): rows are what is summed over.
template <typename Left>
__device__ void times_state(const unsigned char* left, const unsigned char* state, const WarpPlace& at,
                            RowTiles& acc) {
#pragma unroll 4
  for (int step = 0; step < 8; ++step) {
    std::uint32_t a[4];
    load_a<Left>(a, left, at.row, 2 * step);
#pragma unroll
    for (int n = 0; n < kPieces; n += 2) {
      std::uint32_t b[4];
      load_b_transposed<WideTile>(b, state, 16 * step, at.piece + n);
      mma_bf16(acc[n], a, b[0], b[1]);
      mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
  }
}
// acc (32 columns of the warp's half) += left (64, 128) times right^T (64, 128).
template <typename Left, typename Right>
__device__ void times_rows(const unsigned char* left, const unsigned char* right, const WarpPlace& at,
                           SquareTiles& acc) {
#pragma unroll 4
  for (int step = 0; step < 8; ++step) {
    std::uint32_t a[4];
    load_a<Left>(a, left, at.row, 2 * step);
#pragma unroll
    for (int n = 0; n < kPieces / 2; n += 2) {
      std::uint32_t b[4];
      load_b<Right>(b, right, 4 * at.piece + 8 * n, 2 * step);
      mma_bf16(acc[n], a, b[0], b[1]);
      mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
  }
}
// As accumulators lie, whole numbers up to 32767 in a row's half; times `down` they are what they were.
__device__ void store_lanes(unsigned char* to, float* down, const WarpPlace& at, const RowTiles& acc) {
  float up[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    std::uint32_t most = 0;  // as bits: NaN is the largest
#pragma unroll
    for (const auto& tile : acc) {
      most = max(most, __float_as_uint(fabsf(tile[2 * e])));
      most = max(most, __float_as_uint(fabsf(tile[2 * e + 1])));
    }
    most = max(most, __shfl_xor_sync(kFullWarp, most, 1));
    most = max(most, __shfl_xor_sync(kFullWarp, most, 2));
    const float largest = __uint_as_float(most);
    up[e] = largest > kSmallest ? 32767.0F * reciprocal_fast(largest) : 0.0F;
    const float undo = most < kInfinite ? largest * (1.0F / 32767.0F) : __uint_as_float(kNotANumber);
    if (at.quad == 0) down[at.piece / kPieces * kChunk + at.row_of(2 * e)] = undo;
  }
#pragma unroll
  for (int n = 0; n < kPieces; n += 2) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&tile)[4] = acc[n + i / 2];
      const int e = i % 2;
      words[i] = pack_fixed(up[e] * tile[2 * e], up[e] * tile[2 * e + 1]);
    }
    *reinterpret_cast<uint4*>(to + lane_place(at.row, at.piece + n)) = as_piece(words);
  }
}
// Zero where not i > j.
__device__ void store_square(unsigned char* tile, unsigned char* rest, const WarpPlace& at,
                             const SquareTiles& acc) {
#pragma unroll
  for (int n = 0; n < kPieces / 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      const int i = at.row_of(c), piece = at.piece / 2 + n, j = 8 * piece + 2 * at.quad;
      store_both<SquareTile>(tile, rest, i, piece, j < i ? acc[n][c] : 0.0F,
                             j + 1 < i ? acc[n][c + 1] : 0.0F);
    }
  }
}
__device__ void store_diagonal(float* to, const WarpPlace& at, const SquareTiles& acc) {
#pragma unroll
  for (int n = 0; n < kPieces / 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = at.row_of(c);
      if (i == 4 * at.piece + 8 * n + 2 * at.quad + (c & 1)) to[i] = acc[n][c];
    }
  }
}

// Over a quarter of the values, rowsum(S dS') of two keys.
__device__ void store_through(const Shared& shared, float* to) {
  const int pair = static_cast<int>(threadIdx.x) & 63, quarter = static_cast<int>(threadIdx.x) >> 6;
  float2 sum = make_float2(0.0F, 0.0F);
#pragma unroll 8
  for (int value = 32 * quarter; value < 32 * quarter + 32; ++value) {
    const int at = WideTile::at(value, pair / 4) + 4 * (pair % 4);
    const std::uint32_t s = *reinterpret_cast<const std::uint32_t*>(shared.state + at);
    const std::uint32_t d_s = *reinterpret_cast<const std::uint32_t*>(shared.d_state + at);
    sum.x += low_half(s) * low_half(d_s);
    sum.y += high_half(s) * high_half(d_s);
  }
  reinterpret_cast<float2*>(to)[threadIdx.x] = sum;
}

// dv = b dvb, and <dvb, v>, by rows.
__device__ void value_gradients(const ChunkPlace& chunk, std::int64_t heads, std::int64_t head,
                                const RowPieces& v, const Shared& shared, std::uint16_t* d_v,
                                float* along_v) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_row(i);
    const uint4 d_vb = *reinterpret_cast<const uint4*>(shared.d_vb + ColumnTile::at(row, thread_piece()));
    const float along = row_dot(d_vb, v.row[i]), beta = shared.beta[row];
    if (thread_piece() == 0) along_v[row] = along;
    float out[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) out[c] = beta * number(d_vb, c);
    if (row >= chunk.rows) continue;
    *reinterpret_cast<uint4*>(d_v + row_offset(chunk, heads, head, row) + 8 * thread_piece()) =
        pack_piece(out);
  }
}

__device__ void pair_gradients(const Shared& shared, const WarpPlace& at, const KdaBorders& to) {
  {
    SquareTiles d_a = {};
    times_rows<WideTile, ColumnTile>(shared.d_o, shared.vn_rest, at, d_a);
    times_rows<WideTile, ColumnTile>(shared.d_o, shared.vn, at, d_a);
    store_square(to.d_a, to.d_a_rest, at, d_a);
    store_diagonal(to.diagonal, at, d_a);
  }
  SquareTiles d_l = {};
  times_rows<ColumnTile, ColumnTile>(shared.d_vb, shared.vn_rest, at, d_l);
  times_rows<ColumnTile, ColumnTile>(shared.d_vb, shared.vn, at, d_l);
#pragma unroll
  for (int n = 0; n < kPieces / 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) d_l[n][c] *= -shared.beta[at.row_of(c)];
  }
  store_square(to.d_lb, to.d_lb_rest, at, d_l);
}
// Tiles that come late are on their way while others are multiplied.
__device__ void state_gradients(const KdaChunked& a, std::int64_t tile, Shared& shared, const WarpPlace& at,
                                const KdaBorders& to) {
  __syncthreads();
  if (threadIdx.x == 0) {
    request_tile(shared.d_state, a.d_state + tile * kStateTile, kStateTile, shared.after);
  }
  {
    RowTiles d_q = {};
    times_state<WideTile>(shared.d_o, shared.state, at, d_q);
    store_lanes(to.d_q, to.q_down, at, d_q);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    request_tile(shared.vn_rest_again, a.vn_rest + tile * kWideTile, kWideTile, shared.again);
  }
  {
    RowTiles d_kb = {};
    times_state<ColumnTile>(shared.d_vb, shared.state, at, d_kb);
#pragma unroll
    for (auto& four : d_kb) {
#pragma unroll
      for (float& x : four) x = -x;
    }
    shared.after.wait(0);  // its place in scratch takes d_kb
    store_lanes(to.d_kb, to.kb_down, at, d_kb);
  }
  store_through(shared, to.through);
  RowTiles d_k = {};
  times_state<ColumnTile>(shared.vn, shared.d_state, at, d_k);
  shared.again.wait(0);
  times_state<ColumnTile>(shared.vn_rest_again, shared.d_state, at, d_k);
  store_lanes(to.d_k, to.k_down, at, d_k);
}

__global__ void __launch_bounds__(kChunkThreads, 2) kda_chunk_borders(KdaChunked a, KdaChunkOutputs out) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  auto& shared = *reinterpret_cast<Shared*>(kda_shared);
  const int t = static_cast<int>(threadIdx.x);
  const ChunkPlace chunk = chunk_place(a, a.first + blockIdx.y);
  if (chunk.rows == 0) return;
  const std::int64_t head = blockIdx.x, tile = std::int64_t{blockIdx.y} * a.value_heads + head;
  if (t == 0) request_tiles(a, tile, shared);
  const RowPieces d_o = load_rows(out.d_o, chunk, a.value_heads, head);
  const RowPieces v = load_rows(a.v, chunk, a.value_heads, head);
  if (t < kChunk) shared.beta[t] = beta_of(a, chunk, head, t);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    *reinterpret_cast<uint4*>(shared.d_o + WideTile::at(thread_row(i), thread_piece())) = d_o.row[i];
  }
  __syncthreads();
  const WarpPlace at = warp_place(kPieces);
  const KdaBorders to = borders_of(a, tile);
  shared.rows.wait(0);
  shared.before.wait(0);  // its place in scratch takes results
  value_gradients(chunk, a.value_heads, head, v, shared, out.d_v, to.along_v);
  pair_gradients(shared, at, to);
  state_gradients(a, tile, shared, at, to);
}

}  // namespace

void chunk_borders(OpCall& call, const KdaChunked& chunked, const KdaChunkOutputs& out) {
  call.launch(kda_chunk_borders,
              Grid{.x = chunked.value_heads,
                   .y = chunked.count,
                   .threads = kChunkThreads,
                   .shared_bytes = sizeof(Shared)},
              chunked, out);
}

}  // namespace terrace::trainer::cuda
