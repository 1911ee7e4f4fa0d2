// DSA: indexer, top-k, attention over the chosen tokens. Common rules: ops.hpp.
//
// Numbers: q, k, v, gate, y, attention, index_q, index_k, index_w and their gradients are activations, fp32
// or bf16, one type in a call; sink, lse, scores, losses and d_sink are fp32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// Sparse attention: one key and one value row a token, shared by all heads, over the top-k causal positions
// that the indexer chose; optional sink; y = attention * sigmoid(gate).
//
// Positions count from token 0 of the batch row, in every list of them, packed or not. A packed sequence
// selects among its own tokens only, so its lists hold positions from its start on; attention follows the
// lists alone.
struct DsaShape {
  std::int64_t batch, length, heads, key_width, value_width, index_heads, index_width,
      top_k;             // B T H DK DV HI DI k
  float scale = 0;       // DK^-1/2 where 0
  Packing packing = {};  // batch must be 1
  std::int64_t slots() const { return top_k < length ? top_k : length; }
};
struct DsaInputs {
  In q;               // (B, T, H, DK)
  In k;               // (B, T, DK)
  In v;               // (B, T, DV); null: the first DV <= DK numbers of the key row (the MLA form)
  In gate;            // (B, T, H, DV); null: no gate
  const float* sink;  // (H); null: no sink
  In index_q;         // (B, T, HI, DI)
  In index_k;         // (B, T, DI)
  In index_w;         // (B, T, HI)
};
// Chooses the positions: selected (B, T, slots), ascending, padded with -1. Ties go to the lower position.
// scores (B, T, T), where given, gets the indexer's scores, -inf for positions in the future or of another
// sequence; without it no more than 256 MiB of scores, or those of 1024 positions, exist at a time.
struct DsaSelect {
  DsaShape shape;
  DsaInputs in;  // the three of the indexer
  std::int32_t* selected;
  float* scores = nullptr;
};
// selected: as DsaSelect writes it; ascending, then -1. Padding is neither read nor written through, and a
// row of padding alone gives zeros. Null, here and in DsaBackward: every position of the token's sequence up
// to itself, and top_k is at least the length; no more of such lists exists at a time than a few tokens'.
struct Dsa {
  DsaShape shape;
  DsaInputs in;  // those of the attention
  const std::int32_t* selected;
  Out y;                    // (B, T, H, DV)
  float* lse = nullptr;     // (B, T, H): log(sum e^a + e^sink), -inf where there is neither; null: not wanted
  Out attention = nullptr;  // (B, T, H, DV): before the gate; null: not wanted
};
// 32 keys of a token, as bits, and the slot of the first of them that it chose: how many keys come before.
struct KeyWord {
  std::uint32_t bits;
  std::int32_t before;
};
// Of a token; a multiple of 8.
[[nodiscard]] constexpr std::int64_t key_map_words(std::int64_t length) { return (length + 255) / 256 * 8; }
// The lists turned round, from keys to slots, for the backward passes of layers that share a selection. Word
// w of a token speaks of positions 32 w .. 32 w + 31 of its batch row.
struct MapKeys {
  DsaShape shape;  // B, T and k count
  const std::int32_t* selected;
  KeyWord* words;  // (B, T, key_map_words(T)), aligned to 16 bytes
};

struct DsaBackward {
  DsaShape shape;
  DsaInputs in;
  const std::int32_t* selected;
  In d_y;  // null, with all outputs up to d_sink: only the indexer learns
  Out d_q;
  Out d_k;        // of both uses of the row where in.v is null
  Out d_v;        // null where in.v is
  Out d_gate;     // null: not wanted
  float* d_sink;  // (H), adds
  // Gradient of index_loss_weight * sum over tokens of KL(p || softmax(I) on the selected). All three of the
  // indexer or none.
  float index_loss_weight = 0;
  Out d_index_q = nullptr;
  Out d_index_k = nullptr;
  Out d_index_w = nullptr;
  float* index_loss = nullptr;  // (1): the unweighted sum; needs the gradients of the indexer
  // What the forward wrote; each is computed again where it is null.
  const float* lse = nullptr;
  In attention = nullptr;
  // Of `selected`, as MapKeys writes it; null: made anew where it is of use. The bits are the same.
  const KeyWord* key_map = nullptr;
};

// Lists of positions in less memory, for what is kept until the backward pass: 16-bit numbers where they do,
// or one bit a position, whichever is smaller. Lists are ascending, then -1; they come back as they were.
struct IndexLists {
  std::int64_t rows, slots, length;  // positions are in [0, length)
};
enum class IndexForm : std::uint8_t { kList, kShortList, kBitmap };
// A short list repeats a row's last position in its padding; a row of padding alone is 1, 0, 0 ..., which no
// ascending row is. With one slot there is nothing to repeat, and 65535 stands for padding.
[[nodiscard]] constexpr bool fits_short_list(const IndexLists& lists) {
  return lists.length < 65536 || (lists.length == 65536 && lists.slots > 1);
}
[[nodiscard]] constexpr std::int64_t bitmap_words(const IndexLists& lists) {
  return (lists.length + 31) / 32;
}
[[nodiscard]] constexpr IndexForm index_form(const IndexLists& lists) {
  const std::int64_t list = lists.slots * (fits_short_list(lists) ? 2 : 4);
  if (bitmap_words(lists) * 4 < list) return IndexForm::kBitmap;
  return fits_short_list(lists) ? IndexForm::kShortList : IndexForm::kList;
}
// Of all rows.
[[nodiscard]] constexpr std::int64_t packed_index_bytes(const IndexLists& lists) {
  switch (index_form(lists)) {
    case IndexForm::kBitmap:
      return lists.rows * bitmap_words(lists) * 4;
    case IndexForm::kShortList:
      return lists.rows * lists.slots * 2;
    case IndexForm::kList:
      break;
  }
  return lists.rows * lists.slots * 4;
}
struct PackIndices {
  IndexLists lists;
  const std::int32_t* selected;  // (rows, slots)
  std::byte* packed;             // packed_index_bytes(lists), aligned to 4
};
struct UnpackIndices {
  IndexLists lists;
  const std::byte* packed;
  std::int32_t* selected;
};

// The arrays of an operator that may be bf16, with their lengths.
template <typename Visit>
void visit_attention_inputs(const DsaShape& s, DsaInputs& in, Visit&& visit) {
  const std::int64_t tokens = s.batch * s.length;
  visit(in.q, tokens * s.heads * s.key_width);
  visit(in.k, tokens * s.key_width);
  visit(in.v, tokens * s.value_width);
  visit(in.gate, tokens * s.heads * s.value_width);
}
template <typename Visit>
void visit_index_inputs(const DsaShape& s, DsaInputs& in, Visit&& visit) {
  const std::int64_t tokens = s.batch * s.length;
  visit(in.index_q, tokens * s.index_heads * s.index_width);
  visit(in.index_k, tokens * s.index_width);
  visit(in.index_w, tokens * s.index_heads);
}
template <typename Visit>
void visit_arrays(DsaSelect& op, Visit&& visit) {
  visit_index_inputs(op.shape, op.in, visit);
}
template <typename Visit>
void visit_arrays(Dsa& op, Visit&& visit) {
  const std::int64_t outputs = op.shape.batch * op.shape.length * op.shape.heads * op.shape.value_width;
  visit_attention_inputs(op.shape, op.in, visit);
  visit(op.y, outputs);
  visit(op.attention, outputs);
}
template <typename Visit>
void visit_arrays(DsaBackward& op, Visit&& visit) {
  const DsaShape& s = op.shape;
  const std::int64_t tokens = s.batch * s.length;
  visit_attention_inputs(s, op.in, visit);
  visit_index_inputs(s, op.in, visit);
  visit(op.attention, tokens * s.heads * s.value_width);
  visit(op.d_y, tokens * s.heads * s.value_width);
  visit(op.d_q, tokens * s.heads * s.key_width);
  visit(op.d_k, tokens * s.key_width);
  visit(op.d_v, tokens * s.value_width);
  visit(op.d_gate, tokens * s.heads * s.value_width);
  visit(op.d_index_q, tokens * s.index_heads * s.index_width);
  visit(op.d_index_k, tokens * s.index_width);
  visit(op.d_index_w, tokens * s.index_heads);
}
template <typename Visit>
void visit_arrays(MapKeys&, Visit&&) {}
template <typename Visit>
void visit_arrays(PackIndices&, Visit&&) {}
template <typename Visit>
void visit_arrays(UnpackIndices&, Visit&&) {}

}  // namespace terrace::trainer
