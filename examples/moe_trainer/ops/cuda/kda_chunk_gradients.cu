// One block a chunk and value head: everything from what the walks left. Letters as in docs/OPERATORS.md, q
// with the scale, D from the chunk's start, R to its end:
//   dA = tril(do vn^T)    dvb = M^T dvn    dw = -dvn S^T    dkb = M^T dw    dL = -stril(dvb u^T + dkb w^T)
//   dq = (do S^T) D + dA's rows         dk = (vn dS'^T) R + b D dkb + dA's and dL's rows and columns
//   db = <dvb, v> + <dkb, k D> + <dk2, k>      dv = b dvb
//   dg_t = suffix sum of (q D do S^T + k D b dkb) + prefix sum of k R (vn dS'^T) + pairs across t
//        + D_C rowsum(S dS')
#include "examples/moe_trainer/ops/cuda/kda_chunk_gradients.cuh"

namespace terrace::trainer::cuda {
namespace {

__device__ void request_tiles(const KdaChunked& a, std::int64_t tile, GradientShared& shared) {
  hopper::Barrier* full = &shared.full;
  full->init(1);
  hopper::fence_barrier_init();
  full->arrive_expecting(2 * kStateTile + 4 * kWideTile + kSquareTile);
  load_bulk(shared.state, a.state + tile * kStateTile, kStateTile, full);
  load_bulk(shared.d_state, a.d_state + tile * kStateTile, kStateTile, full);
  load_bulk(shared.in.vn, a.vn + tile * kWideTile, kWideTile, full);
  load_bulk(shared.in.d_vn, a.d_vn + tile * kWideTile, kWideTile, full);
  load_bulk(shared.uw.u, a.u + tile * kWideTile, kWideTile, full);
  load_bulk(shared.uw.w, a.w + tile * kWideTile, kWideTile, full);
  load_bulk(shared.inverse, a.inverse + tile * kSquareTile, kSquareTile, full);
}

// Sums over a row's columns, of the quad's four threads.
__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// dv = b dvb to memory; returns <dvb, v> of rows g and g + 8.
__device__ void value_gradients(const KdaChunked& a, const ChunkPlace& chunk, std::int64_t head,
                                const GradientShared& shared, const WarpPlace& at, const RowTiles& d_vb,
                                std::uint16_t* d_v, float (&along)[2]) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const int row = at.row_of(c);
    if (row >= chunk.rows) continue;
    const float beta = shared.beta[row];
    const std::int64_t from = row_offset(chunk, a.value_heads, head, row);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const std::int64_t place = from + at.column_of(n, 0);
      const std::uint32_t v = *reinterpret_cast<const std::uint32_t*>(a.v + place);
      along[c / 2] += d_vb[n][c] * low_half(v) + d_vb[n][c + 1] * high_half(v);
      *reinterpret_cast<std::uint32_t*>(d_v + place) = pack_bf16(beta * d_vb[n][c], beta * d_vb[n][c + 1]);
    }
  }
}

// What came over the chunk's borders, from gradients of decayed rows to those of rows; and the pair (i, i),
// which no decay separates. shared.rows holds q and k as given. In: d_q is do S^T, d_k is vn dS'^T.
__device__ void join_borders(GradientShared& shared, const WarpPlace& at, const RowTiles& d_kb,
                             PairSums& sums, float (&along)[2]) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const int row = at.row_of(c);
    const float beta = shared.beta[row], q_inverse = shared.q_inverse[row], k_inverse = shared.k_inverse[row];
    const auto diagonal =
        *reinterpret_cast<const std::uint16_t*>(shared.d_a + SquareTile::at(row, row / 8) + 2 * (row % 8));
    const float d_aii = __uint_as_float(std::uint32_t{diagonal} << 16);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int column = at.column_of(n, c);
      const float2 G = *reinterpret_cast<const float2*>(shared.G + row * kRowFloats + column);
      const float2 last = *reinterpret_cast<const float2*>(shared.G + (kChunk - 1) * kRowFloats + column);
      const std::uint32_t q_pair = tile_pair(shared.rows.q, row, at.piece + n, at.quad);
      const std::uint32_t k_pair = tile_pair(shared.rows.k, row, at.piece + n, at.quad);
      float after[2], before[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float g = e == 0 ? G.x : G.y, to_last = (e == 0 ? last.x : last.y) - g;
        const float start = exp2_fast(g), end = exp2_fast(to_last);
        const float q = q_inverse * (e == 0 ? low_half(q_pair) : high_half(q_pair));
        const float k = k_inverse * (e == 0 ? low_half(k_pair) : high_half(k_pair));
        const float d_q = sums.d_q[n][c + e] * start, d_k_end = sums.d_k[n][c + e] * end;
        const float d_k_start = d_kb[n][c + e] * start;
        along[c / 2] += d_k_start * k;
        after[e] = q * d_q + beta * k * d_k_start;
        before[e] = k * d_k_end;
        sums.d_q[n][c + e] = d_q + d_aii * k;
        sums.d_k[n][c + e] = d_k_end + beta * d_k_start + d_aii * q;
      }
      *reinterpret_cast<float2*>(shared.after + row * kRowFloats + column) = make_float2(after[0], after[1]);
      *reinterpret_cast<float2*>(shared.before + row * kRowFloats + column) =
          make_float2(before[0], before[1]);
    }
  }
}

template <int kLevel>
__device__ void level(GradientShared& shared, const UnitRows& x, float scale, const WarpPlace& at,
                      PairSums& sums) {
  __syncthreads();
  scale_rows(x, shared.G, kLevel, scale, shared.rows.q, shared.rows.k);
  __syncthreads();
  add_level<kLevel>(shared, at, sums);
}

// `after` becomes dg: a thread a channel and half of the rows.
__device__ void sum_gate_gradients(GradientShared& shared) {
  const int channel = static_cast<int>(threadIdx.x) & 127, half = static_cast<int>(threadIdx.x) >> 7;
  float* after = shared.after + 32 * half * kRowFloats + channel;
  const float* before = shared.before + 32 * half * kRowFloats + channel;
  float after_sum = 0.0F, before_sum = 0.0F;
#pragma unroll 8
  for (int row = 0; row < 32; ++row) {
    after_sum += after[row * kRowFloats];
    before_sum += before[row * kRowFloats];
  }
  shared.totals[half][channel] = after_sum;
  shared.totals[2 + half][channel] = before_sum;
  __syncthreads();
  float sum = half == 0 ? shared.totals[1][channel] : 0.0F;
#pragma unroll 8
  for (int row = 31; row >= 0; --row) {
    sum += after[row * kRowFloats];
    after[row * kRowFloats] = sum;
  }
  sum = (shared.through[0][channel] + shared.through[1][channel]) *
        exp2_fast(shared.G[(kChunk - 1) * kRowFloats + channel]);
  if (half == 1) sum += shared.totals[2][channel];
#pragma unroll 8
  for (int row = 0; row < 32; ++row) {
    after[row * kRowFloats] += sum;
    sum += before[row * kRowFloats];
  }
  __syncthreads();
}

// dz to memory; dz and the terms of dA stay in `after` and `before`.
__device__ void gate_gradients(const KdaChunked& a, const ChunkPlace& chunk, std::int64_t head,
                               GradientShared& shared, std::uint16_t* d_z) {
  const float rate = expf(a.a_log[head]);
#pragma unroll 1
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_row(i), channel = 8 * thread_piece();
    const uint4 z = load_piece(a.z, chunk, a.value_heads, head, row);
    float d_g[8], out[8], d_a[8];
    load_eight(shared.after + row * kRowFloats + channel, d_g);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float x = number(z, c) + a.dt_bias[head * kChunkedWidth + channel + c];
      if (a.gate == KdaGate::kSoftplus) {
        const float g = -rate * (fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x))));
        out[c] = -rate * d_g[c] * sigmoid(x);
        d_a[c] = d_g[c] * g;
      } else {
        const float y = sigmoid(rate * x);
        out[c] = d_g[c] * a.lower_bound * y * (1.0F - y) * rate;
        d_a[c] = out[c] * x;
      }
      if (row >= chunk.rows) out[c] = 0.0F, d_a[c] = 0.0F;
    }
    store_eight(shared.after + row * kRowFloats + channel, out);
    store_eight(shared.before + row * kRowFloats + channel, d_a);
    if (row >= chunk.rows) continue;
    *reinterpret_cast<uint4*>(d_z + row_offset(chunk, a.value_heads, head, row) + channel) = pack_piece(out);
  }
}

// x r, r = (sum x^2 + eps)^-1/2: dx = r (dy - y <y, dy>).
__device__ void norm_gradients(const ChunkPlace& chunk, std::int64_t heads, std::int64_t head,
                               const RowPieces& x, const float (&inverse)[kRowsPerThread], float scale,
                               const float* d_rows, std::uint16_t* d_x) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_row(i);
    const uint4 piece = forgotten(x.row[i]);
    float d_y[8], along = 0.0F;
    load_eight(d_rows + row * kRowFloats + 8 * thread_piece(), d_y);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      d_y[c] *= scale;
      along += d_y[c] * number(piece, c);
    }
    along = row_sum(along) * inverse[i] * inverse[i];
#pragma unroll
    for (int c = 0; c < 8; ++c) d_y[c] = inverse[i] * (d_y[c] - number(piece, c) * along);
    if (row >= chunk.rows) continue;
    *reinterpret_cast<uint4*>(d_x + row_offset(chunk, heads, head, row) + 8 * thread_piece()) =
        pack_piece(d_y);
  }
}
// The part of one of several value heads that share a key head, before the norm.
__device__ void keep_parts(const float* d_rows, float scale, float* parts) {
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_row(i);
    float d_y[8];
    load_eight(d_rows + row * kRowFloats + 8 * thread_piece(), d_y);
#pragma unroll
    for (float& each : d_y) each *= scale;
    store_eight(parts + row * kChunkedWidth + 8 * thread_piece(), d_y);
  }
}

__device__ void sum_columns(const GradientShared& shared, float* d_dt, float* d_a) {
  const int channel = static_cast<int>(threadIdx.x) & 127;
  const float* from = (threadIdx.x < kChunkedWidth ? shared.after : shared.before) + channel;
  float sum = 0.0F;
#pragma unroll 8
  for (int row = 0; row < kChunk; ++row) sum += from[row * kRowFloats];
  (threadIdx.x < kChunkedWidth ? d_dt : d_a)[channel] = sum;
}

// Up to the pairs: needs the tiles in shared memory. Leaves dA and b dL, `after` and `before`, and q's and
// k's gradients so far.
__device__ void from_walks(const KdaChunked& a, const ChunkPlace& chunk, std::int64_t head, const UnitRows& x,
                           const WarpPlace& at, const KdaChunkOutputs& out, GradientShared& shared,
                           PairSums& sums) {
  float along[2] = {0.0F, 0.0F};
  {
    RowTiles d_vb = {};
    {
      RowTiles d_w = {};
      state_through(shared);
      through_states(shared, at, sums.d_q, d_w, sums.d_k);
      float d_a[4][4] = {};
      add_square<WideTile, ColumnTile>(shared.d_o, shared.in.vn, at, d_a);
      store_square(shared.d_a, at, Diagonal::kWith, d_a);
      solve_transposed<ColumnTile>(shared.inverse, shared.in.d_vn, at, d_vb);
      __syncthreads();
      store_tiles(shared.solved.d_w, at, d_w);
    }
    store_tiles(shared.d_vb, at, d_vb);
    value_gradients(a, chunk, head, shared, at, d_vb, out.d_v, along);
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int place = WideTile::at(thread_row(i), thread_piece());
    *reinterpret_cast<uint4*>(shared.rows.q + place) = x.q.row[i];
    *reinterpret_cast<uint4*>(shared.rows.k + place) = x.k.row[i];
  }
  __syncthreads();
  RowTiles d_kb = {};
  solve_transposed<WideTile>(shared.inverse, shared.solved.d_w, at, d_kb);
  store_tiles(shared.solved.d_kb, at, d_kb);
  __syncthreads();
  {
    float d_l[4][4] = {};
    add_square<WideTile, ColumnTile>(shared.d_vb, shared.uw.u, at, d_l);
    add_square<WideTile, WideTile>(shared.solved.d_kb, shared.uw.w, at, d_l);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) d_l[n][c] *= -shared.beta[at.row_of(c)];
    }
    store_square(shared.d_lb, at, Diagonal::kWithout, d_l);
  }
  __syncthreads();
  join_borders(shared, at, d_kb, sums, along);
#pragma unroll
  for (int c = 0; c < 4; c += 2) sums.d_beta[c / 2] = shared.beta[at.row_of(c)] * along[c / 2];
}

__device__ void add_pairs(const UnitRows& x, float scale, const WarpPlace& at, GradientShared& shared,
                          PairSums& sums) {
  level<32>(shared, x, scale, at, sums);
  level<16>(shared, x, scale, at, sums);
  level<8>(shared, x, scale, at, sums);
  level<4>(shared, x, scale, at, sums);
  level<2>(shared, x, scale, at, sums);
  level<1>(shared, x, scale, at, sums);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      shared.after[at.row_of(c) * kRowFloats + at.column_of(n, c)] += sums.d_g[n][c];
    }
  }
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const float sum = quad_sum(sums.d_beta[c / 2]);
    if (at.quad == 0) shared.d_beta[at.piece / 8][at.row_of(c)] = sum;
  }
  __syncthreads();
  store_rows(shared.d_q, at, sums.d_q);
  store_rows(shared.d_k, at, sums.d_k);
  __syncthreads();
}

__global__ void __launch_bounds__(kChunkThreads, 1) kda_chunk_gradients(KdaChunked a, KdaChunkOutputs out) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  auto& shared = *reinterpret_cast<GradientShared*>(kda_shared);
  const int t = static_cast<int>(threadIdx.x);
  const ChunkPlace chunk = chunk_place(a, a.first + blockIdx.y);
  if (chunk.rows == 0) return;
  const std::int64_t head = blockIdx.x, tile = std::int64_t{blockIdx.y} * a.value_heads + head;
  if (t == 0) request_tiles(a, tile, shared);
  const UnitRows x = load_units(a, chunk, head / a.group);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_row(i);
    *reinterpret_cast<uint4*>(shared.d_o + WideTile::at(row, thread_piece())) =
        load_piece(out.d_o, chunk, a.value_heads, head, row);
    if (thread_piece() == 0) {
      shared.q_inverse[row] = x.q_inverse[i] * a.scale;
      shared.k_inverse[row] = x.k_inverse[i];
    }
  }
  if (t < kChunk) shared.beta[t] = beta_of(a, chunk, head, t);
  sum_decays(a, chunk, head, shared.G);
  shared.full.wait(0);

  const WarpPlace at = warp_place();
  PairSums sums = {};
  from_walks(a, chunk, head, x, at, out, shared, sums);
  add_pairs(x, a.scale, at, shared, sums);
  sum_gate_gradients(shared);
  gate_gradients(a, chunk, head, shared, out.d_z);
  if (a.group == 1) {
    norm_gradients(chunk, a.key_heads, head, x.q, x.q_inverse, a.scale, shared.d_q, out.d_q);
    norm_gradients(chunk, a.key_heads, head, x.k, x.k_inverse, 1.0F, shared.d_k, out.d_k);
  } else {
    keep_parts(shared.d_q, a.scale, out.d_q_parts + tile * kChunk * kChunkedWidth);
    keep_parts(shared.d_k, 1.0F, out.d_k_parts + tile * kChunk * kChunkedWidth);
  }
  if (t < chunk.rows) {
    const float d_beta = (shared.d_beta[0][t] + shared.d_beta[1][t]) * (1.0F - shared.beta[t]);
    out.d_beta[(chunk.first_token + t) * a.value_heads + head] =
        static_cast<std::uint16_t>(pack_bf16(d_beta, 0.0F) & 0xffffU);
  }
  __syncthreads();
  sum_columns(shared, out.d_dt_parts + tile * kChunkedWidth, out.d_a_parts + tile * kChunkedWidth);
}

// dq and dk of a key head: the sum over its value heads, through the norm.
__global__ void __launch_bounds__(kChunkThreads) kda_group_gradients(KdaChunked a, KdaChunkOutputs out) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  auto* rows = reinterpret_cast<float*>(kda_shared);  // a thread reads what it wrote
  const ChunkPlace chunk = chunk_place(a, a.first + blockIdx.y);
  if (chunk.rows == 0) return;
  const std::int64_t key_head = blockIdx.x;
  const std::int64_t tile = std::int64_t{blockIdx.y} * a.value_heads + key_head * a.group;
  const UnitRows x = load_units(a, chunk, key_head);
  for (int which = 0; which < 2; ++which) {
    const float* parts = (which == 0 ? out.d_q_parts : out.d_k_parts) + tile * kChunk * kChunkedWidth;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      float sum[8] = {};
      for (std::int64_t member = 0; member < a.group; ++member) {
        float part[8];
        load_eight(parts + (member * kChunk + thread_row(i)) * kChunkedWidth + 8 * thread_piece(), part);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] += part[c];
      }
      store_eight(rows + thread_row(i) * kRowFloats + 8 * thread_piece(), sum);
    }
    if (which == 0) {
      norm_gradients(chunk, a.key_heads, key_head, x.q, x.q_inverse, 1.0F, rows, out.d_q);
    } else {
      norm_gradients(chunk, a.key_heads, key_head, x.k, x.k_inverse, 1.0F, rows, out.d_k);
    }
  }
}

}  // namespace

void chunk_gradients(OpCall& call, const KdaChunked& chunked, const KdaChunkOutputs& out) {
  Grid grid{.x = chunked.value_heads,
            .y = chunked.count,
            .threads = kChunkThreads,
            .shared_bytes = sizeof(GradientShared)};
  call.launch(kda_chunk_gradients, grid, chunked, out);
  if (chunked.group == 1) return;
  grid.x = chunked.key_heads;
  grid.shared_bytes = kFloatRows;
  call.launch(kda_group_gradients, grid, chunked, out);
}

}  // namespace terrace::trainer::cuda
