// The stages of the backward pass of sparse attention on Hopper's matrix units, for a turn of tokens.
#pragma once

#include "examples/moe_trainer/ops/cuda/dsa.hpp"

namespace terrace::trainer::cuda {

inline constexpr int kBlockSlots = 64;  // slots come in blocks

// Tokens of a turn, at most.
inline constexpr std::int64_t kTurnTokens = 512;

// P and dA, a row of 64 heads a slot: (turn, 64 blocks, 64). Slots past a token's count are zero up to the
// end of their block; blocks past it are not written.
struct SlotBlocks {
  Bf16* p;
  Bf16* d_logit;
  std::int64_t blocks;  // a token
};
[[nodiscard]] constexpr std::int64_t slot_blocks(std::int64_t slots) {
  return (slots + kBlockSlots - 1) / kBlockSlots;
}

struct TokenGradients {
  DsaSizes sizes;
  DsaTurn turn;
  const Bf16* q;
  const Bf16* k;
  const Bf16* v;  // null: the start of the key row
  const std::int32_t* selected;
  const float* lse;    // (turn, H)
  const float* delta;  // (turn, H)
  const Bf16* d_o;     // (turn, H, DV)
  SlotBlocks out;
  Bf16* d_q;  // (B T, H, DK)
};
void launch_token_gradients(OpCall& call, const TokenGradients& a);

// The indexer's side of a turn; d_x as SlotBlocks has its numbers.
inline constexpr int kIndexWidth = 128;
struct IndexForm {  // of its keys: see MlaForm
  static constexpr int kKey = kIndexWidth, kValue = 0;
  static constexpr bool kShared = true;
};
inline constexpr std::int64_t kMaxIndexSlots = 16384;  // their scores lie in shared memory
struct IndexGradients {
  DsaSizes sizes;
  DsaTurn turn;
  const Bf16* q;  // of the indexer, all tokens
  const Bf16* k;
  const Bf16* w;
  const std::int32_t* selected;
  const float* share;  // (turn, slots)
  float weight;
  std::int64_t blocks;  // a token
  Bf16* d_x;
  Bf16* d_q;
  Bf16* d_w;
  float* losses;  // (B T)
};
[[nodiscard]] bool index_fits_hopper(OpCall& call, const DsaBackward& op);
void launch_index_gradients(OpCall& call, const IndexGradients& a);

// dK and dV as sums in fp32, the first of two ways: all keys up to the turn's last token, in blocks, whether
// a token chose them or not. Its products grow with the keys, those of the second way with the slots.
inline constexpr int kKeyBlock = 256;
struct KeyBlocks {
  DsaSizes sizes;
  DsaTurn turn;  // at most kTurnTokens
  const Bf16* q;
  const Bf16* d_o;  // (turn, H, DV)
  const std::int32_t* selected;
  SlotBlocks blocks;
  KeyWord* words;            // of the turn's tokens: scratch of key_words(), or a part of what MapKeys made
  std::int64_t token_words;  // a token
  float* partial;            // scratch: key_partial_numbers()
  float* d_k;                // (B T, DK), adds
  float* d_v;                // (B T, DV), adds; null: added to the first columns of d_k
};
// The first key that the turn's tokens can have chosen: of their first batch row.
[[nodiscard]] constexpr std::int64_t first_key_of(const DsaSizes& sizes, const DsaTurn& turn) {
  return turn.first / sizes.length * sizes.length;
}
// What a turn needs, the indexer's keys included.
[[nodiscard]] std::int64_t key_words(const DsaSizes& sizes, const DsaTurn& turn);
[[nodiscard]] std::int64_t key_partial_numbers(const DsaSizes& sizes, const DsaTurn& turn);
// Once a turn, before either of the next two; what MapKeys made is marked.
void launch_mark_keys(OpCall& call, const KeyBlocks& a);
void launch_key_blocks(OpCall& call, const KeyBlocks& a);
// The same for the indexer's keys: sizes.heads and key_width are the indexer's, blocks.d_logit is d_x; p, d_o
// and d_v are null.
void launch_index_key_blocks(OpCall& call, const KeyBlocks& a);

// The second way: a row for every slot of every token, then a sum for every key; what `part` (tokens of the
// turn, at most 64) adds, key by key in the order of tokens.
struct KeyContributions {
  DsaSizes sizes;
  DsaTurn turn;  // what `d_o` and `blocks` start with
  DsaTurn part;
  const Bf16* q;
  const Bf16* d_o;
  const std::int32_t* selected;
  SlotBlocks blocks;
  Bf16* rows;                  // scratch: (part, 64 blocks, dsa_row_width)
  unsigned long long* chosen;  // scratch: (B T), a bit for each token of the part
  float* d_k;                  // (B T, DK)
  float* d_v;                  // (B T, DV); null: added to the first columns of d_k
};
inline constexpr int kPartTokens = 64;
// Columns of a contribution: of the key row, and of the value where it is another.
[[nodiscard]] TERRACE_HOST_DEVICE constexpr std::int64_t dsa_row_width(const DsaSizes& sizes) {
  if (sizes.value_width == 0) return sizes.key_width;
  return sizes.key_width == 576 ? 576 : sizes.key_width + sizes.value_width;
}
void launch_key_contributions(OpCall& call, const KeyContributions& a);
// The same for the indexer's keys: sizes.heads and key_width are the indexer's, value_width is 0,
// blocks.d_logit is d_x; p, d_o and d_v are null.
void launch_index_key_contributions(OpCall& call, const KeyContributions& a);

}  // namespace terrace::trainer::cuda
