// What both passes of dense attention need on Hopper: tensor maps of the heads' rows, and the order of the
// blocks.
//
// A tile is rows of one head in boxes of 64 columns with the 128-byte swizzle, one box behind the other. Past
// the end of a sequence of the batch a tile holds zeros.
#pragma once

#include "examples/moe_trainer/ops/cuda/attention.hpp"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"

namespace terrace::trainer::cuda {

inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxRowBytes = 2 * kBoxColumns;

struct HeadsView {
  const void* at;
  RowStride rows;
  std::int64_t heads;
  int width;
};
[[nodiscard]] inline hopper::TensorView tensor_view(const AttentionSizes& s, const HeadsView& heads,
                                                    int tile_rows) {
  return {.at = heads.at,
          .type = hopper::ElementType::kBf16,
          .rank = 4,
          .extent = {heads.width, s.length, heads.heads, s.batch},
          .stride = {1, heads.rows.token, heads.rows.head, s.length * heads.rows.token},
          .box = {kBoxColumns, tile_rows, 1, 1}};
}

// Written two numbers at a time.
[[nodiscard]] inline bool takes_pairs(const void* at, const RowStride& rows) {
  return reinterpret_cast<std::uintptr_t>(at) % 4 == 0 && rows.token % 2 == 0 && rows.head % 2 == 0;
}

// Blocks of `pairs` (batch and head) run together for `pairs_together` of them, so that what they stream over
// and over stays in L2; among these, the blocks with the longest way to go start first.
struct BlockOrder {
  std::int64_t pairs, pairs_together;
  int blocks;  // of a pair
};
[[nodiscard]] inline BlockOrder block_order(const AttentionSizes& s, std::int64_t pairs, int block_rows,
                                            std::int64_t streamed_heads_per_pair) {
  constexpr std::int64_t kCacheBytes = 24 << 20;  // about half of L2
  const std::int64_t bytes =
      std::int64_t{2} * s.length * (s.key_width + s.value_width) * streamed_heads_per_pair;
  const std::int64_t fit = kCacheBytes / bytes;
  return {pairs, fit < 1 ? 1 : fit > pairs ? pairs : fit, static_cast<int>(ceil_div(s.length, block_rows))};
}
struct BlockPlace {
  std::int64_t pair;
  int turn;  // 0 starts first
};
TERRACE_HOST_DEVICE inline BlockPlace place_of(const BlockOrder& order, std::int64_t block) {
  const std::int64_t of_group = order.pairs_together * order.blocks, group = block / of_group;
  const std::int64_t first = group * order.pairs_together, left = order.pairs - first;
  const std::int64_t together = left < order.pairs_together ? left : order.pairs_together;
  const std::int64_t inside = block - group * of_group;
  return {first + inside % together, static_cast<int>(inside / together)};
}

}  // namespace terrace::trainer::cuda
