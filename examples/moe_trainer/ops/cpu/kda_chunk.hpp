// One chunk of one head of the gated delta rule, in padded tiles; forward and backward share it.
//
// A chunk is sixteen rows. Rows past the end of the sequence are zero with decay 1, and widths are padded
// with zeros to multiples of 16, so nothing inside has an edge. Decays between two rows are running products
// of the rows' own decays e^g: every factor is at most 1, nothing overflows and no large exponents cancel.
// docs/OPERATORS.md has the mathematics.
#pragma once

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/small_matmul.hpp"

namespace terrace::trainer::cpu {

inline constexpr std::int64_t kChunkRows = 16;

struct KdaSizes {
  explicit KdaSizes(const KdaShape& shape);
  std::int64_t chunks, key, value;  // of the longest sequence there can be; padded widths
  float scale;
};

// Which value head of which sequence; a sequence is a batch row where nothing is packed.
struct KdaTask {
  std::int64_t sequence, value_head;
};
// One value head of one sequence: pointers to its first token, distances between tokens.
struct KdaHead {
  KdaHead(const KdaShape& shape, const KdaInputs& in, const KdaTask& task);
  std::int64_t value_head;
  std::int64_t first_token, length, chunks;  // of the sequence
  std::int64_t key_stride, value_stride, gate_stride, beta_stride;
  std::int64_t key_at, value_at, gate_at, beta_at, state_at;  // offsets into the tensors
  float a;                                                    // e^A
  const float* dt_bias;
};

// Everything the passes derive from a chunk's inputs. Rows are `key` or `value` floats apart.
struct KdaChunk {
  KdaChunk(const KdaSizes& sizes, ScratchCursor& cursor);

  std::int64_t rows = 0;         // real rows
  float *q, *k;                  // l2-normalised; q also times the scale
  float *inverse_q, *inverse_k;  // (16) the factors of the norm
  float* v;
  float* beta;                         // (16) after sigmoid
  float *gate, *slope;                 // g, and the gate's sigmoid (backward needs it)
  float *decay, *from_start, *to_end;  // e^g; its product from the first row; from the next row to the last
  float *k_start, *k_end, *q_start;    // k and q times from_start, k times to_end
  float *aqk, *l;                      // (16, 16), lower and strictly lower
  float *w, *u;
};

void load_chunk(const KdaShape& shape, const KdaSizes& sizes, const KdaInputs& in, const KdaHead& head,
                std::int64_t first, KdaChunk& chunk);
// vn = u - w S.
void residual(const KdaSizes& sizes, const KdaChunk& chunk, const float* state, float* vn);
// S = diag(from_start of the last row) S + k_end^T vn.
void advance_state(const KdaSizes& sizes, const KdaChunk& chunk, const float* vn, float* state);

// The state (K, V) in its padded form and back; null `from` gives zeros.
void load_state(const KdaShape& shape, const KdaSizes& sizes, const float* from, float* state);
void store_state(const KdaShape& shape, const KdaSizes& sizes, const float* state, float* to);

// Rows of a padded tile from a strided tensor; rows past `rows` and columns past `width` become zero.
struct Tile {
  std::int64_t rows, width, stride, padded;
};
void load_tile(const Tile& tile, const float* from, float* to);

}  // namespace terrace::trainer::cpu
