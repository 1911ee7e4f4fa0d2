// One block a chunk and value head: from what kda_chunk_borders left to the inputs' gradients. Letters as in
// docs/OPERATORS.md, q with the scale, D from the chunk's start, R to its end:
//   dq = (do S^T) D + dA's rows         dk = (vn dS'^T) R + b D dkb + dA's and dL's rows and columns
//   db = <dvb, v> + <dkb, k D> + <dk2, k>
//   dg_t = suffix sum of (q D do S^T + k D b dkb) + prefix sum of k R (vn dS'^T) + pairs across t
//        + D_C rowsum(S dS')
// By rows, thread t holds rows t / 16 + 32 i, i < 2, and the eight channels from 8 (t % 16); by columns, a
// quarter of a channel's rows.
#include "examples/moe_trainer/ops/cuda/kda_chunk_pairs.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kShareRows = 2;
constexpr int kQuarter = kChunk / 4;

__device__ std::uint32_t word(const uint4& piece, int i) {
  return i == 0 ? piece.x : i == 1 ? piece.y : i == 2 ? piece.z : piece.w;
}
__device__ int share_row(int i) { return (static_cast<int>(threadIdx.x) >> 4) + 32 * i; }
// Channel and quarter of a thread by columns.
__device__ int column_channel() { return static_cast<int>(threadIdx.x) & 127; }
__device__ int column_quarter() { return static_cast<int>(threadIdx.x) >> 7; }

// A branch for eight numbers and not for each.
__device__ void log2_decays(const GateOf& gate, float (&x)[8]) {
  if (gate.gate == KdaGate::kSoftplus) {
#pragma unroll
    for (float& each : x) each = GateOf{gate.rate, 0.0F, KdaGate::kSoftplus}.log2_decay(each);
  } else {
#pragma unroll
    for (float& each : x) each = GateOf{gate.rate, gate.lower_bound, KdaGate::kLowerBound}.log2_decay(each);
  }
}
__device__ float sigmoid_fast(float x) { return reciprocal_fast(1.0F + exp2_fast(-kLog2E * x)); }

// q and k as given, what divides them, and log decays, base 2.
__device__ void load_chunk(const KdaChunked& a, const ChunkPlace& chunk, std::int64_t head,
                           PairShared& shared) {
  uint4 q[kShareRows], k[kShareRows], z[kShareRows];
  const auto key_head = static_cast<std::uint32_t>(head) / static_cast<std::uint32_t>(a.group);
#pragma unroll
  for (int i = 0; i < kShareRows; ++i) {
    z[i] = load_piece(a.z, chunk, a.value_heads, head, share_row(i));
    q[i] = load_piece(a.q, chunk, a.key_heads, key_head, share_row(i));
    k[i] = load_piece(a.k, chunk, a.key_heads, key_head, share_row(i));
  }
  float dt[8];
#pragma unroll
  for (int c = 0; c < 8; ++c) dt[c] = a.dt_bias[head * kChunkedWidth + 8 * thread_piece() + c];
  const GateOf gate = gate_of(a, head);
#pragma unroll
  for (int i = 0; i < kShareRows; ++i) {
    const int row = share_row(i), place = WideTile::at(row, thread_piece());
    float g[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) g[c] = number(z[i], c) + dt[c];
    log2_decays(gate, g);
    if (row >= chunk.rows) {
#pragma unroll
      for (float& each : g) each = 0.0F;
    }
    store_eight(shared.G + row * kRowFloats + 8 * thread_piece(), g);
    *reinterpret_cast<uint4*>(shared.q + place) = q[i];
    *reinterpret_cast<uint4*>(shared.k + place) = k[i];
    const float q_inverse = rsqrtf(row_dot(q[i], q[i]) + a.l2_eps);
    const float k_inverse = rsqrtf(row_dot(k[i], k[i]) + a.l2_eps);
    if (thread_piece() == 0) shared.q_inverse[row] = q_inverse, shared.k_inverse[row] = k_inverse;
  }
}

// G becomes its sum along the chunk. True where a block's rows decay too far for one reference.
__device__ bool sum_decays(PairShared& shared) {
  const int channel = column_channel(), quarter = column_quarter();
  float* column = shared.G + quarter * kQuarter * kRowFloats + channel;
  float sums[kQuarter], sum = 0.0F;
#pragma unroll
  for (int row = 0; row < kQuarter; ++row) sums[row] = sum += column[row * kRowFloats];
  shared.totals[quarter][channel] = sum;
  const bool wide = sums[0] - sums[7] > kWidestSpan || sums[7] - sums[kQuarter - 1] > kWidestSpan;
  const bool any_wide = __syncthreads_or(static_cast<int>(wide)) != 0;
  sum = 0.0F;
  for (int other = 0; other < quarter; ++other) sum += shared.totals[other][channel];
#pragma unroll
  for (int row = 0; row < kQuarter; ++row) column[row * kRowFloats] = sum + sums[row];
  __syncthreads();
  return any_wide;
}

// What came over the chunk's borders, as accumulators lie.
struct BorderPieces {
  uint4 d_q[kPairPieces / 2], d_k[kPairPieces / 2], d_kb[kPairPieces / 2];
  float q_down[2], k_down[2], kb_down[2];  // of rows g and g + 8
};
__device__ BorderPieces load_borders(const KdaBorders& from, const WarpPlace& at) {
  BorderPieces out;
#pragma unroll
  for (int n = 0; n < kPairPieces / 2; ++n) {
    const int place = lane_place(at.row, at.piece + 2 * n);
    out.d_q[n] = *reinterpret_cast<const uint4*>(from.d_q + place);
    out.d_k[n] = *reinterpret_cast<const uint4*>(from.d_k + place);
    out.d_kb[n] = *reinterpret_cast<const uint4*>(from.d_kb + place);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int place = at.piece / 8 * kChunk + at.row_of(2 * e);
    out.q_down[e] = from.q_down[place];
    out.k_down[e] = from.k_down[place];
    out.kb_down[e] = from.kb_down[place];
  }
  return out;
}

// From gradients of decayed rows to those of rows; and the pair (i, i), which no decay separates.
__device__ void join_borders(const BorderPieces& from, const WarpPlace& at, float scale, PairShared& shared,
                             PairSums& sums) {
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    const int row = at.row_of(c);
    const float beta = shared.beta[row], k_inverse = shared.k_inverse[row];
    const float q_inverse = shared.q_inverse[row] * scale, d_aii = shared.diagonal[row];
    float along = 0.0F;
#pragma unroll
    for (int n = 0; n < kPairPieces; ++n) {
      const int column = at.column_of(n), which = n % 2 * 2 + c / 2;
      const float2 G = *reinterpret_cast<const float2*>(shared.G + row * kRowFloats + column);
      const float2 last = *reinterpret_cast<const float2*>(shared.G + (kChunk - 1) * kRowFloats + column);
      const std::uint32_t q_pair = tile_pair(shared.q, row, at.piece + n, at.quad);
      const std::uint32_t k_pair = tile_pair(shared.k, row, at.piece + n, at.quad);
      const float2 d_qs = unpack_fixed(word(from.d_q[n / 2], which));
      const float2 d_ks = unpack_fixed(word(from.d_k[n / 2], which));
      const float2 d_kbs = unpack_fixed(word(from.d_kb[n / 2], which));
      float before[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto half = [e](std::uint32_t pair) { return e == 0 ? low_half(pair) : high_half(pair); };
        const auto of = [e](const float2& pair) { return e == 0 ? pair.x : pair.y; };
        const float g = e == 0 ? G.x : G.y, to_last = (e == 0 ? last.x : last.y) - g;
        const float start = exp2_fast(g), q = q_inverse * half(q_pair), k = k_inverse * half(k_pair);
        const float d_q = of(d_qs) * from.q_down[c / 2] * start;
        const float d_k_start = of(d_kbs) * from.kb_down[c / 2] * start;
        const float d_k_end = of(d_ks) * from.k_down[c / 2] * exp2_fast(to_last);
        along += d_k_start * k;
        before[e] = k * d_k_end;
        sums.d_g[n][c + e] = q * d_q + beta * k * d_k_start;
        sums.d_q[n][c + e] = d_q + d_aii * k;
        sums.d_k[n][c + e] = d_k_end + beta * d_k_start + d_aii * q;
      }
      *reinterpret_cast<float2*>(shared.before + row * kRowFloats + column) =
          make_float2(before[0], before[1]);
    }
    sums.d_beta[c / 2] = beta * along;
  }
}

__device__ void store_rows(float* rows, const WarpPlace& at, const Tiles& acc) {
#pragma unroll
  for (int n = 0; n < kPairPieces; ++n) {
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      *reinterpret_cast<float2*>(rows + at.row_of(c) * kRowFloats + at.column_of(n)) =
          make_float2(acc[n][c], acc[n][c + 1]);
    }
  }
}

// The sums leave the registers; `after` becomes dg.
__device__ void sum_gate_gradients(PairShared& shared, const WarpPlace& at, const PairSums& sums) {
  store_rows(shared.after, at, sums.d_g);
  store_rows(shared.d_q, at, sums.d_q);
#pragma unroll
  for (int c = 0; c < 4; c += 2) {
    float sum = sums.d_beta[c / 2];  // over the quad's columns
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (at.quad == 0) shared.d_beta[at.piece / kPairPieces][at.row_of(c)] = sum;
  }
  __syncthreads();
  const int channel = column_channel(), quarter = column_quarter();
  float* after = shared.after + quarter * kQuarter * kRowFloats + channel;
  const float* before = shared.before + quarter * kQuarter * kRowFloats + channel;
  float up[kQuarter], down[kQuarter], up_sum = 0.0F, down_sum = 0.0F;
#pragma unroll
  for (int row = kQuarter - 1; row >= 0; --row) up[row] = up_sum += after[row * kRowFloats];
#pragma unroll
  for (int row = 0; row < kQuarter; ++row) {
    down[row] = down_sum;
    down_sum += before[row * kRowFloats];
  }
  shared.totals[quarter][channel] = up_sum;
  shared.totals[4 + quarter][channel] = down_sum;
  float sum = shared.through[channel] * exp2_fast(shared.G[(kChunk - 1) * kRowFloats + channel]);
  __syncthreads();
  for (int other = 0; other < 4; ++other) {
    if (other > quarter) sum += shared.totals[other][channel];
    if (other < quarter) sum += shared.totals[4 + other][channel];
  }
#pragma unroll
  for (int row = 0; row < kQuarter; ++row) after[row * kRowFloats] = sum + up[row] + down[row];
  store_rows(shared.d_k, at, sums.d_k);
  __syncthreads();
}

// From dg to dz, and each one's term of dA. In: x = z + dt.
__device__ void gate_gradient(const GateOf& gate, const float (&x)[8], float (&d_g)[8], float (&d_rate)[8]) {
  if (gate.gate == KdaGate::kSoftplus) {
    const GateOf softplus{gate.rate, 0.0F, KdaGate::kSoftplus};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      d_rate[c] = d_g[c] * softplus.log2_decay(x[c]) * (1.0F / kLog2E);
      d_g[c] *= -gate.rate * sigmoid_fast(x[c]);
    }
  } else {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float y = sigmoid_fast(gate.rate * x[c]);
      d_g[c] *= gate.lower_bound * gate.rate * y * (1.0F - y);
      d_rate[c] = d_g[c] * x[c];
    }
  }
}
// dz to memory; `after` and `before` keep, of each pair of rows, the sums of dz and of the terms of dA.
__device__ void gate_gradients(const KdaChunked& a, const ChunkPlace& chunk, std::int64_t head,
                               const uint4 (&z)[kShareRows], PairShared& shared, std::uint16_t* d_z) {
  const GateOf gate = gate_of(a, head);
  const int channel = 8 * thread_piece();
  float dt[8], d_dt[8] = {}, d_a[8] = {};
#pragma unroll
  for (int c = 0; c < 8; ++c) dt[c] = a.dt_bias[head * kChunkedWidth + channel + c];
#pragma unroll
  for (int i = 0; i < kShareRows; ++i) {
    const int row = share_row(i);
    if (row >= chunk.rows) continue;
    float x[8], d_x[8], d_rate[8];
    load_eight(shared.after + row * kRowFloats + channel, d_x);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = number(z[i], c) + dt[c];
    gate_gradient(gate, x, d_x, d_rate);
#pragma unroll
    for (int c = 0; c < 8; ++c) d_dt[c] += d_x[c], d_a[c] += d_rate[c];
    *reinterpret_cast<uint4*>(d_z + row_offset(chunk, a.value_heads, head, row) + channel) = pack_piece(d_x);
  }
  store_eight(shared.after + share_row(0) * kRowFloats + channel, d_dt);
  store_eight(shared.before + share_row(0) * kRowFloats + channel, d_a);
}
__device__ void sum_columns(const PairShared& shared, float* d_dt, float* d_a) {
  if (threadIdx.x >= 2 * kChunkedWidth) return;
  const int channel = column_channel();
  const float* from = (threadIdx.x < kChunkedWidth ? shared.after : shared.before) + channel;
  float sum = 0.0F;
#pragma unroll 8
  for (int row = 0; row < kChunk / 2; ++row) sum += from[row * kRowFloats];
  (threadIdx.x < kChunkedWidth ? d_dt : d_a)[channel] = sum;
}

// y = x r, r = (sum x^2 + eps)^-1/2: dx = r (dy - y <y, dy>). A row's sixteen threads; d_y becomes d_x.
__device__ void norm_gradient(const uint4& x, float inverse, float (&d_y)[8]) {
  float along = 0.0F;
#pragma unroll
  for (int c = 0; c < 8; ++c) along += d_y[c] * number(x, c);
  along = row_sum(along) * inverse * inverse;
#pragma unroll
  for (int c = 0; c < 8; ++c) d_y[c] = inverse * (d_y[c] - number(x, c) * along);
}
// dq or dk of a chunk's row, times `scale`: to memory through the norm; or, of one of several value heads
// that share a key head, to its parts.
struct RowsGradient {
  const unsigned char* x;
  const float *inverse, *d_rows;
  float scale;
  std::uint16_t* to;
  float* parts;
};
__device__ void finish_rows(const KdaChunked& a, const ChunkPlace& chunk, std::int64_t head,
                            const RowsGradient& of) {
#pragma unroll
  for (int i = 0; i < kShareRows; ++i) {
    const int row = share_row(i);
    float d_y[8];
    load_eight(of.d_rows + row * kRowFloats + 8 * thread_piece(), d_y);
#pragma unroll
    for (float& each : d_y) each *= of.scale;
    if (a.group > 1) {
      store_eight(of.parts + row * kChunkedWidth + 8 * thread_piece(), d_y);
      continue;
    }
    norm_gradient(*reinterpret_cast<const uint4*>(of.x + WideTile::at(row, thread_piece())), of.inverse[row],
                  d_y);
    if (row >= chunk.rows) continue;
    *reinterpret_cast<uint4*>(of.to + row_offset(chunk, a.key_heads, head, row) + 8 * thread_piece()) =
        pack_piece(d_y);
  }
}

__global__ void __launch_bounds__(kPairThreads, 1) kda_chunk_gradients(KdaChunked a, KdaChunkOutputs out) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  auto& shared = *reinterpret_cast<PairShared*>(kda_shared);
  const int t = static_cast<int>(threadIdx.x);
  const ChunkPlace chunk = chunk_place(a, a.first + blockIdx.y);
  if (chunk.rows == 0) return;
  const std::int64_t head = blockIdx.x, tile = std::int64_t{blockIdx.y} * a.value_heads + head;
  const KdaBorders from = borders_of(a, tile);
  if (t == 0) {
    shared.full.init(1);
    hopper::fence_barrier_init();
    shared.full.arrive_expecting(4 * kSquareTile);
    load_bulk(shared.d_a, from.d_a, 2 * kSquareTile, &shared.full);
    load_bulk(shared.rests.d_a, from.d_a_rest, kSquareTile, &shared.full);
    load_bulk(shared.rests.d_lb, from.d_lb_rest, kSquareTile, &shared.full);
  }
  load_chunk(a, chunk, head, shared);
  const WarpPlace at = warp_place(kPairPieces);
  const BorderPieces pieces = load_borders(from, at);
  if (t < kChunk) {
    shared.beta[t] = beta_of(a, chunk, head, t);
    shared.along_v[t] = from.along_v[t];
    shared.diagonal[t] = from.diagonal[t];
  }
  if (t < kChunkedWidth) {
    float sum = 0.0F;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) sum += from.through[quarter * kChunkedWidth + t];
    shared.through[t] = sum;
  }
  __syncthreads();
  const bool wide = sum_decays(shared);
  PairSums sums;
  join_borders(pieces, at, a.scale, shared, sums);
  shared.full.wait(0);
  add_pairs(shared, at, a.scale, wide, sums);

  uint4 z[kShareRows];
#pragma unroll
  for (int i = 0; i < kShareRows; ++i) z[i] = load_piece(a.z, chunk, a.value_heads, head, share_row(i));
  sum_gate_gradients(shared, at, sums);
  gate_gradients(a, chunk, head, z, shared, out.d_z);
  const std::int64_t parts = tile * kChunk * kChunkedWidth;
  finish_rows(a, chunk, head,
              {shared.q, shared.q_inverse, shared.d_q, a.scale, out.d_q, out.d_q_parts + parts});
  finish_rows(a, chunk, head, {shared.k, shared.k_inverse, shared.d_k, 1.0F, out.d_k, out.d_k_parts + parts});
  if (t < chunk.rows) {
    const float beta = shared.beta[t];
    float d_beta = beta * shared.along_v[t];
#pragma unroll
    for (const auto& quarter : shared.d_beta) d_beta += quarter[t];
    out.d_beta[(chunk.first_token + t) * a.value_heads + head] =
        static_cast<std::uint16_t>(pack_bf16(d_beta * (1.0F - beta), 0.0F) & 0xffffU);
  }
  __syncthreads();
  sum_columns(shared, out.d_dt_parts + tile * kChunkedWidth, out.d_a_parts + tile * kChunkedWidth);
}

// dq and dk of a key head: the sum over its value heads, through the norm.
__global__ void __launch_bounds__(kChunkThreads) kda_group_gradients(KdaChunked a, KdaChunkOutputs out) {
  const ChunkPlace chunk = chunk_place(a, a.first + blockIdx.y);
  if (chunk.rows == 0) return;
  const std::int64_t key_head = blockIdx.x;
  const std::int64_t tile = std::int64_t{blockIdx.y} * a.value_heads + key_head * a.group;
  for (int which = 0; which < 2; ++which) {
    const float* parts = (which == 0 ? out.d_q_parts : out.d_k_parts) + tile * kChunk * kChunkedWidth;
    std::uint16_t* to = which == 0 ? out.d_q : out.d_k;
#pragma unroll 1
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = thread_row(i);
      const uint4 x = load_piece(which == 0 ? a.q : a.k, chunk, a.key_heads, key_head, row);
      float sum[8] = {};
      for (std::int64_t member = 0; member < a.group; ++member) {
        float part[8];
        load_eight(parts + (member * kChunk + row) * kChunkedWidth + 8 * thread_piece(), part);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] += part[c];
      }
      norm_gradient(x, rsqrtf(row_dot(x, x) + a.l2_eps), sum);
      if (row >= chunk.rows) continue;
      *reinterpret_cast<uint4*>(to + row_offset(chunk, a.key_heads, key_head, row) + 8 * thread_piece()) =
          pack_piece(sum);
    }
  }
}

}  // namespace

void chunk_gradients(OpCall& call, const KdaChunked& chunked, const KdaChunkOutputs& out) {
  chunk_borders(call, chunked, out);
  call.launch(kda_chunk_gradients,
              Grid{.x = chunked.value_heads,
                   .y = chunked.count,
                   .threads = kPairThreads,
                   .shared_bytes = sizeof(PairShared)},
              chunked, out);
  if (chunked.group == 1) return;
  call.launch(kda_group_gradients, Grid{.x = chunked.key_heads, .y = chunked.count, .threads = kChunkThreads},
              chunked, out);
}

}  // namespace terrace::trainer::cuda
