// The logits of some rows and words by our own product: bf16 in, fp32 sums, and an epilogue in place of the
// logits. Compute capability 9.0.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/loss_rows.hpp"

namespace terrace::trainer::cuda {

// What becomes of a tile of logits.
enum class TileResult : std::uint8_t {
  kParts,                 // its rows' parts and label logits
  kPartsAndExponentials,  // and e^(logit - the part's largest)
  kGradient,              // from finished rows: d_logits
};

// Both matrices whole: (tokens, width) and (vocabulary, width).
struct TileMaps {
  CUtensorMap hidden, weight;
};
struct TileMatrices {
  std::int64_t tokens, width, vocabulary;
  const Bf16* hidden;
  const Bf16* weight;
};
// Whether the copy engine takes them: width a multiple of 8, addresses of 16 bytes, 32-bit coordinates.
[[nodiscard]] bool take_tiles(const TileMatrices& matrices);
[[nodiscard]] TileMaps make_tile_maps(OpCall& call,
                                      const TileMatrices& matrices);  // precondition: take_tiles

struct TileRange {
  std::int64_t first_row;          // in hidden; rows.rows of them
  std::int64_t first_word, words;  // first_word: 0 but for kGradient; a multiple of kLossTileWords
  std::int64_t width;
  std::int64_t pitch;  // of out; at least words, rounded up to kLossTileWords
  Bf16* out;           // (rows, pitch); words past the last are undefined
};
void launch_tiles(OpCall& call, TileResult result, const TileMaps& maps, const RowsOf& rows,
                  const TileRange& range);

}  // namespace terrace::trainer::cuda
