// KDA in chunks of 64 rows on tensor cores: bf16 arrays, key and value width 128, compute capability 9.0.
//
//   prepare_chunks     all chunks at once: L, its inverse M, w, u, A, k to the chunk's end, q from its start
//   walk_states        in sequence, the state in registers: o; or for backward vn and the state of each chunk
//   walk_gradients     in reverse, dS in registers: dvn and dS of each chunk
//   chunk_gradients    all chunks at once: the inputs' gradients
//
// The list of chunks: chunk n of batch row b is entry n B + b; packed, the sequences' chunks follow one
// another. Scratch grows with the chunks of a turn, not with the length: turns are ranges of the list, one
// after another, with the state between them carried in fp32. Operands of tensor cores are fp16 or bf16, sums
// are fp32, and fp32 too are g, its sums, beta, L, M and the state itself; the copy of a state that backward
// reads is bf16. Where sums over rows cancel, an operand is two bf16 numbers, x and what rounding left of it.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/op_call.hpp"

namespace terrace::trainer::cuda {

inline constexpr int kChunk = 64;          // rows
inline constexpr int kChunkedWidth = 128;  // of keys and of values
inline constexpr int kChunkThreads = 256;  // of a block that works on one chunk
inline constexpr int kDecayFloats = kChunkedWidth + kChunk;

inline constexpr std::int64_t kWideTile = 64 * 256;    // bytes: (64, 128) bf16
inline constexpr std::int64_t kSquareTile = 64 * 128;  // (64, 64)
inline constexpr std::int64_t kStateTile = 128 * 256;  // (128, 128): rows are values, columns keys

struct KdaChunked {
  std::int64_t length, batch, sequences;  // tokens of a batch row
  std::int64_t key_heads, value_heads, group;
  const std::int32_t* starts;          // null: batch rows
  const std::int32_t* sequence_chunk;  // packed: (sequences + 1), place of each one's first chunk in the list
  KdaGate gate;
  float lower_bound, l2_eps, scale;
  const std::uint16_t *q, *k, *v, *z, *beta;
  const float *a_log, *dt_bias;
  std::int64_t first, count;  // this turn's range of the list
  // Tiles of (chunk of the turn, value head). For the walks, in fp16: k D, k R and q D, WideTiles; A without
  // the scale and M = (I + L)^-1, SquareTiles, valid on and below the diagonal's 16-row blocks.
  unsigned char *key_start, *to_end, *from_start, *a, *solve;
  float* decay;  // (chunk, head, 192): e^G of the whole chunk, then b of each row
  // From the walks to the gradients, in bf16: vn, its rest, and dvb = M^T dvn, ColumnTiles; S and dS'. They
  // are enough: dkb = M^T dw = -dvb S^T, and dL = -(dvb u^T + dkb w^T) = -dvb vn^T below the diagonal.
  unsigned char *vn, *vn_rest, *d_vb, *state, *d_state;
};

struct KdaWalk {
  const float* from;      // (sequences, HV, K, V) at the sequence's border; null: zero
  float* to;              // the same; null: not wanted
  const float* carry_in;  // (B or 1, HV, K, V): from the turn before
  float* carry_out;       // for the turn after
  std::uint16_t* o;       // walk_states: null where backward wants vn and states
  const std::uint16_t* d_o;
};

struct KdaChunkOutputs {
  const std::uint16_t* d_o;
  std::uint16_t *d_q, *d_k;      // (B, T, H, K); used where group is 1
  float *d_q_parts, *d_k_parts;  // (chunk, head, 64, K): used where it is not
  std::uint16_t *d_v, *d_z, *d_beta;
  float* d_dt_parts;  // (chunk, HV, K)
  float* d_a_parts;   // (chunk, HV, K)
};

[[nodiscard]] bool runs_chunked(OpCall& call, const Kda& op);
[[nodiscard]] bool runs_chunked(OpCall& call, const KdaBackward& op);
void launch_chunked(OpCall& call, const Kda& op);
void launch_chunked(OpCall& call, const KdaBackward& op);

// The launchers of the kernels, each beside its kernel.
void prepare_chunks(OpCall& call, const KdaChunked& chunked);
void walk_states(OpCall& call, const KdaChunked& chunked, const KdaWalk& walk);
void walk_gradients(OpCall& call, const KdaChunked& chunked, const KdaWalk& walk);
void chunk_gradients(OpCall& call, const KdaChunked& chunked, const KdaChunkOutputs& out);

}  // namespace terrace::trainer::cuda
