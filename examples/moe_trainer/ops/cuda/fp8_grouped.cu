// Grouped products of 8-bit numbers: any shape, in plain fp32; fp8_grouped_hopper.hpp takes what it can
// before. Offsets are read on the device: the grid is sized for the worst case, rows / 64 + groups tiles of
// rows.
#include "examples/moe_trainer/ops/cuda/fp8_elements.cuh"
#include "examples/moe_trainer/ops/cuda/fp8_grouped_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/grouped_tiles.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/tile.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr std::int64_t kMaxSize = 0x3fffffff;  // of each extent: tiles count in 32 bits

template <typename T>
__global__ void __launch_bounds__(kTileThreads) grouped_rows_fp8(GroupedMatmulFp8 op) {
  RowTiles<kTile, kTile, 1> tiles({.offsets = op.offsets,
                                   .groups = static_cast<int>(op.groups),
                                   .width = static_cast<int>(op.n),
                                   .height = 0,
                                   .depth = static_cast<int>(op.k),
                                   .block = 0});
  GroupedTile tile;
  if (!tiles.find(static_cast<int>(blockIdx.x), &tile)) return;
  const std::int64_t channel0 = std::int64_t{tile.group} * op.n + tile.first_column;
  const std::int64_t row0 = tile.first_row;
  const std::int64_t columns = op.n - tile.first_column;
  float sum[kTilePatch][kTilePatch] = {};
  const TileOperand<E4m3> a{op.a + row0 * op.k, tile.rows_left, op.k, 1};
  const TileOperand<E4m3> w{op.w + channel0 * op.k, columns, op.k, 1};
  accumulate_tile(a, w, op.k, sum);
  const TilePlace at = tile_place();
  for (int i = 0; i < kTilePatch; ++i) {
    for (int j = 0; j < kTilePatch; ++j) {
      if (at.row + i >= tile.rows_left || at.column + j >= columns) continue;
      const std::int64_t row = row0 + at.row + i;
      T* out = op.c.as<T>() + row * op.n + tile.first_column + at.column + j;
      const float value = sum[i][j] * op.a_scale[row] * op.w_scale[channel0 + at.column + j];
      store_float(out, op.into == Accumulate::kAdd ? load_float(out) + value : value);
    }
  }
}

}  // namespace

void launch(OpCall& call, const GroupedMatmulFp8& op) {
  call.set_shape({op.groups, op.rows, op.n, op.k});
  if (op.rows <= 0 || op.groups <= 0 || op.n <= 0) return;
  if (grouped_fp8_on_hopper(call, op)) return;
  call.require(op.groups < kMaxSize && op.rows < kMaxSize && op.n < kMaxSize && op.k < kMaxSize,
               "extents below 2^30");
  const std::int64_t tiles = (ceil_div(op.rows, kTile) + op.groups) * ceil_div(op.n, kTile);
  call.require(tiles < kMaxSize, "fewer than 2^30 tiles of 64 by 64");
  with_element(op.c.dtype(), [&](auto number) {
    call.launch(grouped_rows_fp8<decltype(number)>, Grid{.x = tiles, .threads = kTileThreads}, op);
  });
}

}  // namespace terrace::trainer::cuda
