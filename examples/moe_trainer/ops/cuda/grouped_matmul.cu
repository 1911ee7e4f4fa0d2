// Grouped products over rows sorted by expert; e(r) is the expert whose offsets hold row r.
//   forward         c (rows, n) [+]= a (rows, k) w_e^T          w: (groups, n, k)
//   input gradient  c (rows, k) [+]= a (rows, n) w_e
//   weight gradient d_w_e (n, k) [+]= d_c_e^T a_e, zero for an empty expert
// Here: any shape, fp32 or bf16, in plain fp32; grouped_hopper.hpp takes what it can before. Offsets are read
// on the device: the grid is sized for the worst case, rows / 64 + groups tiles of rows.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/glu.hpp"
#include "examples/moe_trainer/ops/cuda/grouped_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/tile.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr std::int64_t kMaxGridZ = 65535;

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

template <typename T>
struct Destination {
  T* data;  // the tile's first element
  std::int64_t stride, rows, columns;
  Accumulate into;
};
template <typename T>
__device__ void store_tile(const Destination<T>& to, const float (&sum)[kTilePatch][kTilePatch]) {
  const TilePlace at = tile_place();
  for (int i = 0; i < kTilePatch; ++i) {
    for (int j = 0; j < kTilePatch; ++j) {
      if (at.row + i >= to.rows || at.column + j >= to.columns) continue;
      T* out = to.data + (at.row + i) * to.stride + at.column + j;
      store_float(out, to.into == Accumulate::kAdd ? load_float(out) + sum[i][j] : sum[i][j]);
    }
  }
}

// c_r (outputs) = a_r (depth) W_e: W_e's element (output o, depth d) at o * output_step + d * depth_step.
struct RowProduct {
  std::int64_t groups, depth, outputs, output_step, depth_step;
  const std::int32_t* offsets;
  In a;
  In w;
  Out c;
  Accumulate into;
};

template <typename T>
__global__ void __launch_bounds__(kTileThreads) grouped_rows(RowProduct p) {
  const RowTile tile = find_row_tile(p.offsets, p.groups, blockIdx.x);
  if (tile.group < 0) return;
  const std::int64_t output0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t outputs = p.outputs - output0;
  float sum[kTilePatch][kTilePatch] = {};
  const TileOperand<T> a{p.a.as<T>() + tile.row * p.depth, tile.rows, p.depth, 1};
  const TileOperand<T> w{p.w.as<T>() + tile.group * p.outputs * p.depth + output0 * p.output_step, outputs,
                         p.output_step, p.depth_step};
  accumulate_tile(a, w, p.depth, sum);
  store_tile<T>({p.c.as<T>() + tile.row * p.outputs + output0, p.outputs, tile.rows, outputs, p.into}, sum);
}

template <typename T>
__global__ void __launch_bounds__(kTileThreads)
    grouped_weights(GroupedWeightGradient op, std::int64_t group0) {
  const std::int64_t group = group0 + blockIdx.z;
  const std::int64_t n0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t k0 = std::int64_t{blockIdx.x} * kTile;
  const std::int64_t begin = op.offsets[group];
  const std::int64_t rows = op.offsets[group + 1] - begin;
  float sum[kTilePatch][kTilePatch] = {};
  const TileOperand<T> d_c{op.d_c.as<T>() + begin * op.n + n0, op.n - n0, 1, op.n};
  const TileOperand<T> a{op.a.as<T>() + begin * op.k + k0, op.k - k0, 1, op.k};
  accumulate_tile(d_c, a, rows, sum);
  store_tile<float>({op.d_w + (group * op.n + n0) * op.k + k0, op.k, op.n - n0, op.k - k0, op.into}, sum);
}

void launch_rows(OpCall& call, const RowProduct& product, std::int64_t rows) {
  call.require(product.w.dtype() == product.a.dtype() && product.c.dtype() == product.a.dtype(),
               "a, w and c of one type");
  const std::int64_t row_tiles = rows > 0 ? ceil_div(rows, kTile) + product.groups : 0;
  const Grid grid{.x = row_tiles, .y = ceil_div(product.outputs, kTile), .threads = kTileThreads};
  with_element(product.a.dtype(),
               [&](auto number) { call.launch(grouped_rows<decltype(number)>, grid, product); });
}

}  // namespace

void launch_grouped_forward(OpCall& call, const GroupedMatmul& op) {
  call.set_shape({op.groups, op.rows, op.n, op.k});
  if (grouped_forward_on_hopper(call, op)) return;
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
  if (grouped_input_gradient_on_hopper(call, op)) return;
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
  call.require(op.a.dtype() == op.d_c.dtype(), "d_c and a of one type");
  if (grouped_weights_on_hopper(call, op)) return;
  with_element(op.a.dtype(), [&](auto number) {
    for (std::int64_t group = 0; group < op.groups; group += kMaxGridZ) {
      const Grid grid{.x = ceil_div(op.k, kTile),
                      .y = ceil_div(op.n, kTile),
                      .z = std::min(kMaxGridZ, op.groups - group),
                      .threads = kTileThreads};
      call.launch(grouped_weights<decltype(number)>, grid, op, group);
    }
  });
}

void launch(OpCall& call, const GroupedGlu& op) {
  call.set_shape({op.groups, op.rows, op.n, op.k});
  call.require(op.w.dtype() == op.a.dtype() && op.y.dtype() == op.a.dtype() &&
                   (!op.gu || op.gu.dtype() == op.a.dtype()),
               "arrays of one type");
  if (op.rows <= 0 || op.n <= 0 || op.groups <= 0) return;
  if (grouped_glu_on_hopper(call, op)) return;
  Out gu = op.gu;
  if (!gu) {
    gu = Out(call.scratch<std::byte>(op.rows * 2 * op.n * bytes_of(op.a.dtype())), op.a.dtype());
  }
  launch_grouped_forward(call, GroupedMatmul{.groups = op.groups,
                                             .rows = op.rows,
                                             .n = 2 * op.n,
                                             .k = op.k,
                                             .offsets = op.offsets,
                                             .a = op.a,
                                             .w = op.w,
                                             .c = gu});
  const std::int64_t up_bytes = op.n * bytes_of(gu.dtype());
  launch_glu_of_groups(call,
                       Glu{.rows = op.rows,
                           .width = op.n,
                           .activation = op.activation,
                           .g = gu,
                           .g_stride = 2 * op.n,
                           .u = In(static_cast<const std::byte*>(gu.at()) + up_bytes, gu.dtype()),
                           .u_stride = 2 * op.n,
                           .y = op.y},
                       {.groups = op.groups, .offsets = op.offsets});
}

}  // namespace terrace::trainer::cuda
