// What the chunked KDA kernels do alike: find a chunk, load its rows, derive gate and norms from them.
//
// Blocks that work on a chunk have 256 threads. By rows, thread t holds rows t / 16 + 16 i, i < 4, and the
// eight channels from 8 (t % 16): one piece of a tile.
#pragma once

#include "examples/moe_trainer/ops/cuda/kda_chunked.hpp"
#include "examples/moe_trainer/ops/cuda/kda_mma.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr int kRowsPerThread = 4;
// fp32 rows in shared memory: eight rows read side by side, as accumulators lie, fall into different banks.
inline constexpr int kRowFloats = kChunkedWidth + 8;

struct ChunkPlace {
  std::int64_t first_token;
  int rows;                              // 0: no such chunk
  std::int64_t sequence, index, chunks;  // the chunk's place in its sequence
};
struct SequencePlace {
  std::int64_t first_token, length, first_entry, step, chunks;  // chunk n is entry first_entry + n step
};
__device__ inline SequencePlace sequence_place(const KdaChunked& a, std::int64_t sequence) {
  if (a.starts == nullptr) {
    return {sequence * a.length, a.length, sequence, a.batch, (a.length + kChunk - 1) / kChunk};
  }
  const std::int64_t begin = a.starts[sequence], length = a.starts[sequence + 1] - begin;
  return {begin, length, a.sequence_chunk[sequence], 1, (length + kChunk - 1) / kChunk};
}
__device__ inline ChunkPlace chunk_place(const KdaChunked& a, std::int64_t entry) {
  // Entries and batch rows are fewer than 2^31 (runs_chunked), and a division of 64 bits is slow.
  const auto entry32 = static_cast<std::uint32_t>(entry);
  std::int64_t sequence = entry32 % static_cast<std::uint32_t>(a.batch);
  if (a.starts != nullptr) {
    if (entry >= a.sequence_chunk[a.sequences]) return {0, 0, 0, 0, 0};
    std::int64_t low = 0, high = a.sequences;  // first chunk of low <= entry < first chunk of high
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      if (a.sequence_chunk[middle] <= entry) {
        low = middle;
      } else {
        high = middle;
      }
    }
    sequence = low;
  }
  const SequencePlace at = sequence_place(a, sequence);
  const std::int64_t index =
      static_cast<std::uint32_t>(entry - at.first_entry) / static_cast<std::uint32_t>(at.step);
  const std::int64_t left = at.length - index * kChunk;
  return {at.first_token + index * kChunk, static_cast<int>(left < kChunk ? left : kChunk), sequence, index,
          at.chunks};
}

struct RowPieces {
  uint4 row[kRowsPerThread];
};
__device__ inline float number(const uint4& piece, int i) {
  const std::uint32_t pair = i < 2 ? piece.x : i < 4 ? piece.y : i < 6 ? piece.z : piece.w;
  return i % 2 == 0 ? low_half(pair) : high_half(pair);
}
__device__ inline uint4 pack_piece(const float (&x)[8]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                    pack_bf16(x[6], x[7]));
}
__device__ inline uint4 as_piece(const std::uint32_t (&pairs)[4]) {
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
__device__ inline int thread_row(int i) { return (static_cast<int>(threadIdx.x) >> 4) + 16 * i; }
__device__ inline int thread_piece() { return static_cast<int>(threadIdx.x) & 15; }

// Eight numbers, 16-byte aligned.
__device__ inline void load_eight(const float* from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
  }
}
__device__ inline void store_eight(float* to, const float (&from)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
  }
}

// Where row `row` of the chunk starts in a (tokens, heads, 128) array.
__device__ inline std::int64_t row_offset(const ChunkPlace& at, std::int64_t heads, std::int64_t head,
                                          int row) {
  return ((at.first_token + row) * heads + head) * kChunkedWidth;
}
// Rows past the sequence are zero.
__device__ inline uint4 load_piece(const std::uint16_t* from, const ChunkPlace& at, std::int64_t heads,
                                   std::int64_t head, int row) {
  if (row >= at.rows) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(from + row_offset(at, heads, head, row) + 8 * thread_piece());
}
__device__ inline RowPieces load_rows(const std::uint16_t* from, const ChunkPlace& at, std::int64_t heads,
                                      std::int64_t head) {
  RowPieces out;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) out.row[i] = load_piece(from, at, heads, head, thread_row(i));
  return out;
}
// Over the sixteen threads that share a row.
__device__ inline float row_sum(float value) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}
__device__ inline float row_dot(const uint4& a, const uint4& b) {
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += number(a, i) * number(b, i);
  return row_sum(sum);
}

struct GateOf {
  float rate, lower_bound;
  KdaGate gate;
  // The log decay, base 2, of x = z + dt.
  __device__ float log2_decay(float x) const {
    if (gate == KdaGate::kLowerBound) {
      return kLog2E * lower_bound * reciprocal_fast(1.0F + exp2_fast(-kLog2E * rate * x));
    }
    // log2(1 + e): where e is small, 1 + e has lost it.
    const float e = exp2_fast(-kLog2E * fabsf(x));
    const float small = kLog2E * e * (1.0F - e * (0.5F - e * (1.0F / 3.0F)));
    return -rate * (kLog2E * fmaxf(x, 0.0F) + (e < 0.01F ? small : log2_fast(1.0F + e)));
  }
};
__device__ inline GateOf gate_of(const KdaChunked& a, std::int64_t head) {
  return {expf(a.a_log[head]), a.lower_bound, a.gate};
}

// Pairs (i, j), i > j, of a chunk's rows are split by the highest bit in which i and j differ: at level s
// rows go in groups of 2 s, i in the upper half of a group and j in the lower. With the lower half's last row
// as reference, e^(G_i - G_j) = e^(G_i - G_ref) e^(G_ref - G_j), and both exponents are <= 0 whatever the
// gate. A row is in one half only, so a level needs one factor a row and channel.
__device__ inline int level_reference(int row, int s) { return (row & ~(2 * s - 1)) + s - 1; }
__device__ inline bool in_level(int i, int j, int s) {
  return (i & s) != 0 && (j & s) == 0 && ((i ^ j) & ~(2 * s - 1)) == 0;
}

__device__ inline float beta_of(const KdaChunked& a, const ChunkPlace& at, std::int64_t head, int row) {
  if (row >= at.rows) return 0.0F;
  const std::uint32_t bits = a.beta[(at.first_token + row) * a.value_heads + head];
  return reciprocal_fast(1.0F + exp2_fast(-kLog2E * __uint_as_float(bits << 16)));
}

// A finished tile from shared memory to scratch, or back.
template <int kBytes, int kThreads>
__device__ void copy_tile(const unsigned char* from, unsigned char* to) {
#pragma unroll
  for (int at = static_cast<int>(threadIdx.x) * 16; at < kBytes; at += kThreads * 16) {
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
  }
}

// An accumulator pair of column 8 n + 2 q, as bf16.
template <typename Tile>
__device__ void store_pair(unsigned char* tile, int row, int n, float low, float high) {
  const int quad = static_cast<int>(threadIdx.x) & 3;
  *reinterpret_cast<std::uint32_t*>(tile + Tile::at(row, n) + 4 * quad) = pack_bf16(low, high);
}
// The same, and what rounding left of it, to two tiles.
template <typename Tile>
__device__ void store_both(unsigned char* tile, unsigned char* rest, int row, int n, float low, float high) {
  const int at = Tile::at(row, n) + 4 * (static_cast<int>(threadIdx.x) & 3);
  const std::uint32_t pair = pack_bf16(low, high);
  *reinterpret_cast<std::uint32_t*>(tile + at) = pair;
  *reinterpret_cast<std::uint32_t*>(rest + at) = rest_of(pair, low, high);
}

}  // namespace terrace::trainer::cuda
