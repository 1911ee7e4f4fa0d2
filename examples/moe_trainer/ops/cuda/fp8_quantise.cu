// bf16 to 8-bit numbers and scales.
//
// Rows: a group of threads holds its row in registers between the maximum and the rounding. Weights, which
// need a scale along either axis: one pass for both maxima (of whole numbers, so their order is free), one
// that reads the weights again and writes both copies, the turned one through shared memory. Widths that
// cannot be read four numbers at a time take a plain kernel, a block a row.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/fp8_elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/row_group.cuh"

namespace terrace::trainer::cuda {
namespace {

__device__ unsigned magnitude_max(unsigned value, int lanes = kWarp) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value = max(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// Over the threads of a group; all threads of the block take part.
template <int kThreads>
__device__ unsigned group_max(unsigned value) {
  value = magnitude_max(value, kThreads < kWarp ? kThreads : kWarp);
  if constexpr (kThreads > kWarp) {
    __shared__ unsigned partial[kThreads / kWarp];
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreads / kWarp; ++i) value = max(value, partial[i]);
  }
  return value;
}

template <typename Group>
__global__ void __launch_bounds__(Group::kBlock) quantise_rows(QuantiseRows op) {
  const std::int64_t row = std::int64_t{blockIdx.x} * Group::kRows + Group::row_in_block();
  const bool live = row < op.rows;
  uint4 packs[Group::kPacks];
  load_row<Group>(op.x.as<Bf16>() + row * op.width, op.width, live, packs);
  PairMax largest;
#pragma unroll
  for (const uint4& pack : packs) {
    largest.take(pack.x);
    largest.take(pack.y);
    largest.take(pack.z);
    largest.take(pack.w);
  }
  const E4m3Scale by = e4m3_scale(group_max<Group::kThreads>(largest.either()));
  if (!live) return;
  if (Group::lane() == 0) op.scale[row] = by.scale;
  E4m3* to = op.q + row * op.width;
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    const int column = Group::column(i);
    if (column >= op.width) continue;
    float x[Group::kNumbers];
    unpack<Bf16>(packs[i], x);
    *reinterpret_cast<uint2*>(to + column) = {quantise_four({x[0], x[1], x[2], x[3]}, by.factor),
                                              quantise_four({x[4], x[5], x[6], x[7]}, by.factor)};
  }
}

// Lines of `count` numbers, `step` apart: line i of group g starts at g * group_step + i * line_step.
struct Lines {
  std::int64_t count, step, each, group_step, line_step;  // `each`: lines of a group
  const Bf16* x;
  E4m3* q;
  float* scale;
};
constexpr int kLineThreads = 256;

__global__ void __launch_bounds__(kLineThreads) quantise_lines(Lines lines) {
  const std::int64_t line = blockIdx.x;
  const Bf16* x = lines.x + line / lines.each * lines.group_step + line % lines.each * lines.line_step;
  unsigned largest = 0;
  for (std::int64_t i = threadIdx.x; i < lines.count; i += kLineThreads) {
    largest = max(largest, x[i * lines.step].bits & 0x7FFFU);
  }
  const E4m3Scale by = e4m3_scale(group_max<kLineThreads>(largest));
  if (threadIdx.x == 0) lines.scale[line] = by.scale;
  for (std::int64_t i = threadIdx.x; i < lines.count; i += kLineThreads) {
    const float one = load_float(x + i * lines.step);
    lines.q[line * lines.count + i].bits =
        static_cast<std::uint8_t>(quantise_four({one, 0, 0, 0}, by.factor));
  }
}

// Tiles of 128 by 128 weights. A warp takes rows, a lane four columns of them.
constexpr int kEdge = 128;
constexpr int kTileWarps = 8;
constexpr int kWeightThreads = kTileWarps * kWarp;
constexpr int kFour = 4;

struct WeightTile {
  std::int64_t group, row, column;
};
__device__ WeightTile weight_tile(const QuantiseWeights& op) {
  const std::int64_t across = (op.k + kEdge - 1) / kEdge;
  const std::int64_t down = (op.n + kEdge - 1) / kEdge;
  const std::int64_t tile = blockIdx.x;
  return {tile / (across * down), tile / across % down * kEdge, tile % across * kEdge};
}
__device__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ int warp_of_block() { return static_cast<int>(threadIdx.x) / kWarp; }

// Maxima by row and by column, as the lower 15 bits of bf16; zeroed before. Null rows: not wanted.
struct Maxima {
  unsigned *rows, *columns;
};

__global__ void __launch_bounds__(kWeightThreads) weight_maxima(QuantiseWeights op, Maxima maxima) {
  __shared__ unsigned by_warp[kTileWarps][kEdge];
  const WeightTile tile = weight_tile(op);
  const int lane = lane_of_warp(), warp = warp_of_block();
  const std::int64_t column = tile.column + lane * kFour;
  const Bf16* w = op.w.as<Bf16>() + tile.group * op.n * op.k + column;
  PairMax left, right;  // columns 0 and 1, 2 and 3
#pragma unroll 4
  for (int i = 0; i < kEdge / kTileWarps; ++i) {
    const std::int64_t row = tile.row + i * kTileWarps + warp;
    if (row >= op.n) break;  // of a whole warp
    uint2 raw{0, 0};
    if (column < op.k) raw = *reinterpret_cast<const uint2*>(w + row * op.k);
    left.take(raw.x);
    right.take(raw.y);
    if (maxima.rows == nullptr) continue;
    PairMax both;
    both.take(raw.x);
    both.take(raw.y);
    const unsigned largest = magnitude_max(both.either());
    if (lane == 0) atomicMax(maxima.rows + tile.group * op.n + row, largest);
  }
  unsigned* mine = by_warp[warp] + lane * kFour;
  mine[0] = left.low;
  mine[1] = left.high >> 16;
  mine[2] = right.low;
  mine[3] = right.high >> 16;
  __syncthreads();
  const int at = static_cast<int>(threadIdx.x);
  if (at >= kEdge || tile.column + at >= op.k) return;
  unsigned largest = 0;
#pragma unroll
  for (const auto& each : by_warp) largest = max(largest, each[at]);
  atomicMax(maxima.columns + tile.group * op.k + tile.column + at, largest);
}

// Maxima become factors where they lie.
__global__ void scales_of_maxima(std::int64_t count, unsigned* maxima, float* scale) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const E4m3Scale by = e4m3_scale(maxima[i]);
  scale[i] = by.scale;
  maxima[i] = __float_as_uint(by.factor);
}

struct Factors {
  const float *rows, *columns;
};

__global__ void __launch_bounds__(kWeightThreads) quantise_weights(QuantiseWeights op, Factors factors) {
  // Word (column, four rows), the word's place moved so that lanes of a warp hit different banks both ways.
  __shared__ unsigned turned[kEdge * kWarp];
  const auto place = [](int column, int fourth) { return column * kWarp + (fourth ^ (column / kFour)); };
  const WeightTile tile = weight_tile(op);
  const int lane = lane_of_warp(), warp = warp_of_block();
  const std::int64_t column = tile.column + lane * kFour;
  const bool in_width = column < op.k;
  float4 by{};
  if (in_width) by = *reinterpret_cast<const float4*>(factors.columns + tile.group * op.k + column);
#pragma unroll 2
  for (int fourth = warp; fourth < kEdge / kFour; fourth += kTileWarps) {
    const std::int64_t row = tile.row + fourth * kFour;
    if (row >= op.n) break;
    float4 x[kFour] = {};
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      const std::int64_t line = tile.group * op.n + row + i;
      if (!in_width) continue;
      x[i] = load_four(op.w.as<Bf16>() + line * op.k + column);
      if (op.q == nullptr) continue;
      *reinterpret_cast<unsigned*>(op.q + line * op.k + column) = quantise_four(x[i], factors.rows[line]);
    }
    const int at = lane * kFour;
    turned[place(at, fourth)] = quantise_four({x[0].x, x[1].x, x[2].x, x[3].x}, by.x);
    turned[place(at + 1, fourth)] = quantise_four({x[0].y, x[1].y, x[2].y, x[3].y}, by.y);
    turned[place(at + 2, fourth)] = quantise_four({x[0].z, x[1].z, x[2].z, x[3].z}, by.z);
    turned[place(at + 3, fourth)] = quantise_four({x[0].w, x[1].w, x[2].w, x[3].w}, by.w);
  }
  __syncthreads();
  const std::int64_t row = tile.row + lane * kFour;
  if (row >= op.n) return;
  for (int at = warp; at < kEdge && tile.column + at < op.k; at += kTileWarps) {
    E4m3* to = op.q_turned + (tile.group * op.k + tile.column + at) * op.n + row;
    *reinterpret_cast<unsigned*>(to) = turned[place(at, lane)];
  }
}

bool rows_in_packs(const QuantiseRows& op) {
  return op.width % kPack<Bf16> == 0 && aligned(op.x.at()) && aligned(op.q, 8);
}
bool weights_in_fours(const QuantiseWeights& op) {
  return op.n % kFour == 0 && op.k % kFour == 0 && aligned(op.w.at(), 8) && aligned(op.q, 4) &&
         aligned(op.q_turned, 4);
}

void launch_lines(OpCall& call, const Lines& lines, std::int64_t count) {
  call.launch(quantise_lines, Grid{.x = count, .threads = kLineThreads}, lines);
}

void launch_scales(OpCall& call, std::int64_t count, unsigned* maxima, float* scale) {
  call.launch(scales_of_maxima, grid_for(count), count, maxima, scale);
}

// The turned copy, and the other where op.q is given.
void launch_tiles(OpCall& call, const QuantiseWeights& op) {
  const std::int64_t rows = op.q == nullptr ? 0 : op.groups * op.n, columns = op.groups * op.k;
  // Columns first: their factors are read four at a time.
  auto* maxima = call.scratch<unsigned>(columns + rows);
  call.zero(reinterpret_cast<float*>(maxima), columns + rows);
  unsigned* by_row = rows > 0 ? maxima + columns : nullptr;
  const Grid grid{.x = op.groups * ceil_div(op.n, kEdge) * ceil_div(op.k, kEdge), .threads = kWeightThreads};
  call.launch(weight_maxima, grid, op, Maxima{by_row, maxima});
  launch_scales(call, columns, maxima, op.turned_scale);
  launch_scales(call, rows, by_row, op.scale);
  call.launch(quantise_weights, grid, op,
              Factors{reinterpret_cast<const float*>(by_row), reinterpret_cast<const float*>(maxima)});
}

}  // namespace

void launch(OpCall& call, const QuantiseRows& op) {
  call.set_shape({op.rows, op.width});
  call.require(op.x.dtype() == Dtype::kBf16, "x in bf16");
  if (op.rows <= 0) return;
  const bool taken = rows_in_packs(op) && with_row_group<Bf16>(op.width, [&](auto group) {
                       using Group = decltype(group);
                       call.launch(quantise_rows<Group>,
                                   Grid{.x = ceil_div(op.rows, Group::kRows), .threads = Group::kBlock}, op);
                     });
  if (taken) return;
  launch_lines(call,
               {.count = op.width,
                .step = 1,
                .each = op.rows,
                .group_step = 0,
                .line_step = op.width,
                .x = op.x.as<Bf16>(),
                .q = op.q,
                .scale = op.scale},
               op.rows);
}

void launch(OpCall& call, const QuantiseWeights& op) {
  call.set_shape({op.groups, op.n, op.k});
  call.require(op.w.dtype() == Dtype::kBf16, "w in bf16");
  if (op.groups <= 0 || op.n <= 0 || op.k <= 0) return;
  if (op.q_turned != nullptr && weights_in_fours(op)) return launch_tiles(call, op);
  if (op.q != nullptr) {
    launch(call, QuantiseRows{op.groups * op.n, op.k, op.w, op.q, op.scale});
    call.set_shape({op.groups, op.n, op.k});
  }
  if (op.q_turned == nullptr) return;
  launch_lines(call,
               {.count = op.n,
                .step = op.k,
                .each = op.k,
                .group_step = op.n * op.k,
                .line_step = 1,
                .x = op.w.as<Bf16>(),
                .q = op.q_turned,
                .scale = op.turned_scale},
               op.groups * op.k);
}

}  // namespace terrace::trainer::cuda
