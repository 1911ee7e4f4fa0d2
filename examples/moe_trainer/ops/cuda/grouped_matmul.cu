// Grouped products over rows sorted by expert; e(r) is the expert whose offsets hold row r.
//   forward         c (rows, n) [+]= a (rows, k) w_e^T          w: (groups, n, k)
//   input gradient  c (rows, k) [+]= a (rows, n) w_e
//   weight gradient d_w_e (n, k) [+]= d_c_e^T a_e, zero for an empty expert
// Offsets are read on the device: the grid is sized for the worst case, rows / 64 + groups tiles of rows.
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/tile.cuh"

namespace terrace::trainer::cuda {
namespace {

struct RowTile {
  std::int64_t group;  // -1: this block has no tile
  std::int64_t row;
  std::int64_t rows;
};

__device__ RowTile find_row_tile(const std::int32_t* offsets, std::int64_t groups, std::int64_t tile) {
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t begin = offsets[group];
    const std::int64_t count = offsets[group + 1] - begin;
    const std::int64_t tiles = (count + kTile - 1) / kTile;
    if (tile < tiles) {
      const std::int64_t left = count - tile * kTile;
      return {group, begin + tile * kTile, left < kTile ? left : kTile};
    }
    tile -= tiles;
  }
  return {-1, 0, 0};
}

struct Destination {
  float* data;  // the tile's first element
  std::int64_t stride, rows, columns;
  Accumulate into;
};
__device__ void store_tile(const Destination& to, const float (&sum)[kTilePatch][kTilePatch]) {
  const TilePlace at = tile_place();
  for (int i = 0; i < kTilePatch; ++i) {
    for (int j = 0; j < kTilePatch; ++j) {
      if (at.row + i >= to.rows || at.column + j >= to.columns) continue;
      float* out = to.data + (at.row + i) * to.stride + at.column + j;
      *out = to.into == Accumulate::kAdd ? *out + sum[i][j] : sum[i][j];
    }
  }
}

// c_r (outputs) = a_r (depth) W_e: W_e's element (output o, depth d) at o * output_step + d * depth_step.
struct RowProduct {
  std::int64_t groups, depth, outputs, output_step, depth_step;
  const std::int32_t* offsets;
  const float* a;
  const float* w;
  float* c;
  Accumulate into;
};

__global__ void __launch_bounds__(kTileThreads) grouped_rows(RowProduct p) {
  const RowTile tile = find_row_tile(p.offsets, p.groups, blockIdx.x);
  if (tile.group < 0) return;
  const std::int64_t output0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t outputs = p.outputs - output0;
  float sum[kTilePatch][kTilePatch] = {};
  const TileOperand a{p.a + tile.row * p.depth, tile.rows, p.depth, 1};
  const TileOperand w{p.w + tile.group * p.outputs * p.depth + output0 * p.output_step, outputs,
                      p.output_step, p.depth_step};
  accumulate_tile(a, w, p.depth, sum);
  store_tile({p.c + tile.row * p.outputs + output0, p.outputs, tile.rows, outputs, p.into}, sum);
}

__global__ void __launch_bounds__(kTileThreads) grouped_weights(GroupedWeightGradient op) {
  const std::int64_t group = blockIdx.z;
  const std::int64_t n0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t k0 = std::int64_t{blockIdx.x} * kTile;
  const std::int64_t begin = op.offsets[group];
  const std::int64_t rows = op.offsets[group + 1] - begin;
  float sum[kTilePatch][kTilePatch] = {};
  const TileOperand d_c{op.d_c + begin * op.n + n0, op.n - n0, 1, op.n};
  const TileOperand a{op.a + begin * op.k + k0, op.k - k0, 1, op.k};
  accumulate_tile(d_c, a, rows, sum);
  store_tile({op.d_w + (group * op.n + n0) * op.k + k0, op.k, op.n - n0, op.k - k0, op.into}, sum);
}

void launch_rows(OpCall& call, const RowProduct& product, std::int64_t rows) {
  const std::int64_t row_tiles = rows > 0 ? ceil_div(rows, kTile) + product.groups : 0;
  call.launch(grouped_rows,
              Grid{.x = row_tiles, .y = ceil_div(product.outputs, kTile), .threads = kTileThreads}, product);
}

}  // namespace

void launch_grouped_forward(OpCall& call, const GroupedMatmul& op) {
  call.set_shape({op.groups, op.rows, op.n, op.k});
  launch_rows(call,
              RowProduct{.groups = op.groups,
                         .depth = op.k,
                         .outputs = op.n,
                         .output_step = op.k,
                         .depth_step = 1,
                         .offsets = op.offsets,
                         .a = op.a,
                         .w = op.w,
                         .c = op.c,
                         .into = op.into},
              op.rows);
}

void launch_grouped_input_gradient(OpCall& call, const GroupedMatmul& op) {
  call.set_shape({op.groups, op.rows, op.n, op.k});
  launch_rows(call,
              RowProduct{.groups = op.groups,
                         .depth = op.n,
                         .outputs = op.k,
                         .output_step = 1,
                         .depth_step = op.k,
                         .offsets = op.offsets,
                         .a = op.a,
                         .w = op.w,
                         .c = op.c,
                         .into = op.into},
              op.rows);
}

void launch(OpCall& call, const GroupedWeightGradient& op) {
  call.set_shape({op.groups, op.rows, op.n, op.k});
  call.launch(
      grouped_weights,
      Grid{.x = ceil_div(op.k, kTile), .y = ceil_div(op.n, kTile), .z = op.groups, .threads = kTileThreads},
      op);
}

}  // namespace terrace::trainer::cuda
