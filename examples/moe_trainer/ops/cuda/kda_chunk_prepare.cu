// One block a chunk and value head. With D = e^G from the chunk's start, R to its end:
//   A_ij = s <q_i, k_j e^(G_i - G_j)>, i >= j     L_ij = b_i <k_i, k_j e^(G_i - G_j)>, i > j
//   M = (I + L)^-1    w = M (b k D)    u = M (b v)    to_end = k R    from_start = s q D
// L and M are fp32 throughout: for nearly equal keys L is all ones and M the difference of neighbours, so an
// error in L or in a product of blocks comes back multiplied by the chunk's rows. M itself is rounded to bf16
// only as an operand: its large entries are few.
#include "examples/moe_trainer/ops/cuda/kda_chunked.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kL = kChunk + 4;  // floats a row of L and M
constexpr int kT = 36;          // and of a (32, 32) product

struct Shared {
  float G[kChunk * kRowFloats];  // then M and T, see below
  unsigned char q[kWideTile];    // a level's operands; then b k D and b v, then w and u
  unsigned char k[kWideTile];
  float L[kChunk * kL];  // then M in bf16
  unsigned char a[kSquareTile];
  float beta[kChunk];
};
struct SharedInverse {
  float M[kChunk * kL];
  float T[32 * kT];
};
static_assert(sizeof(SharedInverse) <= sizeof(Shared::G) && kSquareTile <= sizeof(Shared::L));

// Which product a warp forms.
enum class Pair : std::uint8_t { kQueryKey, kKeyKey };

__device__ void store_pairs(Shared& shared, Pair pair, int i, int n, float low, float high) {
  if (pair == Pair::kQueryKey) {
    store_pair<SquareTile>(shared.a, i, n, low, high);
    return;
  }
  const int quad = static_cast<int>(threadIdx.x) & 3;
  const float beta = shared.beta[i];
  *reinterpret_cast<float2*>(shared.L + i * kL + 8 * n + 2 * quad) = make_float2(beta * low, beta * high);
}

// acc = rows i of q or k (16) times rows j of k (16).
__device__ void multiply_rows(const Shared& shared, Pair pair, int i, int j, float (&acc)[2][4]) {
  const unsigned char* left = pair == Pair::kQueryKey ? shared.q : shared.k;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) acc[n][c] = 0.0F;
  }
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    std::uint32_t a[4], b[4];
    load_a<WideTile>(a, left, i, 2 * step);
    load_b<WideTile>(b, shared.k, j, 2 * step);
    mma_bf16(acc[0], a, b[0], b[1]);
    mma_bf16(acc[1], a, b[2], b[3]);
  }
}

// Levels whose groups are made of whole 16-row blocks: 32 and 16.
template <int kLevel>
__device__ void far_level(Shared& shared, const UnitRows& x, float scale) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();
  scale_rows(x, shared.G, kLevel, scale, shared.q, shared.k);
  __syncthreads();
  const Pair pair = (warp & 1) == 0 ? Pair::kQueryKey : Pair::kKeyKey;
  const int second = (warp >> 1) & 1, third = warp >> 2;
  const int i = kLevel == 32 ? 32 + 16 * second : 16 + 32 * second;
  const int j = kLevel == 32 ? 16 * third : 32 * second;
  float acc[2][4];
  multiply_rows(shared, pair, i, j, acc);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    if (kLevel == 16 && n != third) continue;
    store_pairs(shared, pair, i + (lane >> 2), j / 8 + n, acc[n][0], acc[n][1]);
    store_pairs(shared, pair, i + (lane >> 2) + 8, j / 8 + n, acc[n][2], acc[n][3]);
  }
}

// Levels inside 16-row blocks: a warp keeps one block's result and takes from each level what belongs to it.
template <int kLevel>
__device__ void near_level(Shared& shared, const UnitRows& x, float scale, float (&result)[2][4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();
  scale_rows(x, shared.G, kLevel, scale, shared.q, shared.k);
  __syncthreads();
  float acc[2][4];
  multiply_rows(shared, (warp & 1) == 0 ? Pair::kQueryKey : Pair::kKeyKey, 16 * (warp >> 1), 16 * (warp >> 1),
                acc);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = (lane >> 2) + 8 * (c >> 1), j = 8 * n + 2 * (lane & 3) + (c & 1);
      if (in_level(i, j, kLevel)) result[n][c] = acc[n][c];
    }
  }
}

__device__ void pair_matrices(Shared& shared, const UnitRows& x, float scale) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / kWarp;
  far_level<32>(shared, x, scale);
  far_level<16>(shared, x, scale);
  float result[2][4] = {};
  near_level<8>(shared, x, scale, result);
  near_level<4>(shared, x, scale, result);
  near_level<2>(shared, x, scale, result);
  near_level<1>(shared, x, scale, result);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const Pair pair = (warp & 1) == 0 ? Pair::kQueryKey : Pair::kKeyKey;
    const int i = 16 * (warp >> 1) + (lane >> 2), piece = 2 * (warp >> 1) + n;
    store_pairs(shared, pair, i, piece, result[n][0], result[n][1]);
    store_pairs(shared, pair, i + 8, piece, result[n][2], result[n][3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {  // <q_i, k_i>: no decay
    const float dot =
        row_dot(forgotten(x.q.row[i]), forgotten(x.k.row[i])) * x.q_inverse[i] * x.k_inverse[i] * scale;
    const int row = thread_row(i);
    if (thread_piece() == 0) {
      auto* diagonal =
          reinterpret_cast<std::uint16_t*>(shared.a + SquareTile::at(row, row / 8) + 2 * (row % 8));
      *diagonal = static_cast<std::uint16_t>(pack_bf16(dot, 0.0F));
    }
  }
}

// out (row, 4 columns) = sign * sum over m < kInner of left[m] right[m][4 columns].
template <int kInner>
__device__ float4 row_times(const float* left, const float* right, int right_stride) {
  float4 sum = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#pragma unroll 8
  for (int m = 0; m < kInner; ++m) {
    const float4 r = *reinterpret_cast<const float4*>(right + m * right_stride);
    sum.x += left[m] * r.x, sum.y += left[m] * r.y, sum.z += left[m] * r.z, sum.w += left[m] * r.w;
  }
  return sum;
}
__device__ void store_negated(float* to, const float4& x) {
  *reinterpret_cast<float4*>(to) = make_float4(-x.x, -x.y, -x.z, -x.w);
}

// M = (I + L)^-1: the 16-row blocks on the diagonal by substitution, a warp each; then, for blocks of 16 and
// of 32 rows, M21 = -M22 (L21 M11).
__device__ void invert(const float* L, SharedInverse& to) {
  const int t = static_cast<int>(threadIdx.x);
  float* M = to.M;
  if (t < 4 * kWarp && t % kWarp < 16) {
    const int block = 16 * (t / kWarp), column = t % kWarp;
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
      for (int m = 0; m < i; ++m) x[i] -= L[(block + i) * kL + block + m] * x[m];
      M[(block + i) * kL + block + column] = x[i];
    }
  }
  __syncthreads();
  const int half = (t >> 6) & 1, row16 = (t & 63) >> 2, column16 = 4 * (t & 3);
  const int top = 32 * half, bottom = top + 16;
  if (t < 128) {
    *reinterpret_cast<float4*>(to.T + (16 * half + row16) * kT + column16) =
        row_times<16>(L + (bottom + row16) * kL + top, M + top * kL + top + column16, kL);
  } else {
    store_negated(M + (top + row16) * kL + bottom + column16, make_float4(0.0F, 0.0F, 0.0F, 0.0F));
  }
  __syncthreads();
  if (t < 128) {
    store_negated(M + (bottom + row16) * kL + top + column16,
                  row_times<16>(M + (bottom + row16) * kL + bottom, to.T + 16 * half * kT + column16, kT));
  }
  __syncthreads();
  const int row = t >> 3, column = 4 * (t & 7);
  *reinterpret_cast<float4*>(to.T + row * kT + column) = row_times<32>(L + (32 + row) * kL, M + column, kL);
  __syncthreads();
  store_negated(M + (32 + row) * kL + column, row_times<32>(M + (32 + row) * kL + 32, to.T + column, kT));
  __syncthreads();
}

// M in bf16 as an operand; above the diagonal it is zero.
__device__ void round_inverse(const float* M, unsigned char* tile) {
  const int row = static_cast<int>(threadIdx.x) >> 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int piece = 2 * (static_cast<int>(threadIdx.x) & 3) + half;
    float x[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = 8 * piece + c <= row ? M[row * kL + 8 * piece + c] : 0.0F;
    *reinterpret_cast<uint4*>(tile + SquareTile::at(row, piece)) = pack_piece(x);
  }
}

// Four warps do w, four u: 16 rows each, all columns. In place: every warp reads before any writes.
__device__ void apply_inverse(const unsigned char* inverse, unsigned char* w, unsigned char* u) {
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int block = warp & 3;
  unsigned char* tile = warp < 4 ? w : u;
  float acc[16][4] = {};
  for (int step = 0; step <= block; ++step) {
    std::uint32_t a[4];
    load_a<SquareTile>(a, inverse, 16 * block, 2 * step);
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      std::uint32_t b[4];
      load_b_transposed<WideTile>(b, tile, 16 * step, n);
      mma_bf16(acc[n], a, b[0], b[1]);
      mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const int row = 16 * block + (lane >> 2);
    if (warp < 4) {
      store_pair<WideTile>(tile, row, n, acc[n][0], acc[n][1]);
      store_pair<WideTile>(tile, row + 8, n, acc[n][2], acc[n][3]);
    } else {
      store_pair<ColumnTile>(tile, row, n, acc[n][0], acc[n][1]);
      store_pair<ColumnTile>(tile, row + 8, n, acc[n][2], acc[n][3]);
    }
  }
  __syncthreads();
}

// to_end and from_start go straight to scratch; b k D stays, as does b v.
__device__ void decayed_rows(const KdaChunked& a, const ChunkPlace& at, std::int64_t head, std::int64_t tile,
                             const UnitRows& x, Shared& shared) {
  float last[8];
  load_eight(shared.G + (kChunk - 1) * kRowFloats + 8 * thread_piece(), last);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_row(i), place = WideTile::at(row, thread_piece());
    const float beta = shared.beta[row];
    const uint4 v = load_piece(a.v, at, a.value_heads, head, row);
    const uint4 q_row = forgotten(x.q.row[i]), k_row = forgotten(x.k.row[i]);
    float G[8], from_start[8], to_end[8], key[8], value[8];
    load_eight(shared.G + row * kRowFloats + 8 * thread_piece(), G);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float decay = exp2_fast(G[c]);
      const float k = number(k_row, c) * x.k_inverse[i];
      from_start[c] = number(q_row, c) * (x.q_inverse[i] * a.scale * decay);
      to_end[c] = k * exp2_fast(last[c] - G[c]);
      key[c] = beta * k * decay;
      value[c] = beta * number(v, c);
    }
    *reinterpret_cast<uint4*>(a.from_start + tile * kWideTile + place) = pack_piece(from_start);
    *reinterpret_cast<uint4*>(a.to_end + tile * kWideTile + place) = pack_piece(to_end);
    *reinterpret_cast<uint4*>(shared.q + place) = pack_piece(key);
    *reinterpret_cast<uint4*>(shared.k + place) = pack_piece(value);
  }
}

__global__ void __launch_bounds__(kChunkThreads, 2) kda_prepare_chunks(KdaChunked a) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(kda_shared);
  const int t = static_cast<int>(threadIdx.x);
  const ChunkPlace at = chunk_place(a, a.first + blockIdx.y);
  if (at.rows == 0) return;
  const std::int64_t head = blockIdx.x, tile = std::int64_t{blockIdx.y} * a.value_heads + head;
  if (t < kChunk) shared.beta[t] = beta_of(a, at, head, t);
  for (int i = t * 16; i < kSquareTile; i += kChunkThreads * 16) {
    *reinterpret_cast<uint4*>(shared.a + i) = make_uint4(0, 0, 0, 0);
  }
  const UnitRows x = load_units(a, at, head / a.group);
  sum_decays(a, at, head, shared.G);
  if (t < kChunkedWidth) {
    a.decay[tile * kChunkedWidth + t] = exp2_fast(shared.G[(kChunk - 1) * kRowFloats + t]);
  }
  pair_matrices(shared, x, a.scale);
  decayed_rows(a, at, head, tile, x, shared);
  __syncthreads();
  SharedInverse& inverse = *reinterpret_cast<SharedInverse*>(shared.G);
  invert(shared.L, inverse);
  auto* rounded = reinterpret_cast<unsigned char*>(shared.L);
  round_inverse(inverse.M, rounded);
  copy_tile<kSquareTile, kChunkThreads>(shared.a, a.a + tile * kSquareTile);
  __syncthreads();
  if (a.inverse != nullptr) {
    copy_tile<kSquareTile, kChunkThreads>(rounded, a.inverse + tile * kSquareTile);
  }
  apply_inverse(rounded, shared.q, shared.k);
  copy_tile<kWideTile, kChunkThreads>(shared.q, a.w + tile * kWideTile);
  copy_tile<kWideTile, kChunkThreads>(shared.k, a.u + tile * kWideTile);
}

}  // namespace

void prepare_chunks(OpCall& call, const KdaChunked& chunked) {
  call.launch(kda_prepare_chunks,
              Grid{.x = chunked.value_heads,
                   .y = chunked.count,
                   .threads = kChunkThreads,
                   .shared_bytes = sizeof(Shared)},
              chunked);
}

}  // namespace terrace::trainer::cuda
