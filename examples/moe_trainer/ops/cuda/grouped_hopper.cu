// Chooses a tile for a grouped product, describes its arrays to the copy engine, and launches it.
#include "examples/moe_trainer/ops/cuda/grouped_hopper.hpp"

#include <algorithm>

#include "examples/moe_trainer/ops/cuda/grouped_epilogue.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"

namespace terrace::trainer::cuda {
namespace {

using hopper::ElementType;
using hopper::TensorView;

constexpr std::int64_t kMaxInt = 0x7fffffff;
constexpr std::int64_t kMaxTiles = kMaxInt / 2;  // a block steps past the last one

// Clusters of two share half of what they read, which is most of what a large tile waits for. Groups with few
// rows have one row of tiles each and read mostly W, from memory: nothing to share.
template <Product kProduct>
using WideTile = ProductShape<kProduct, 128, 256, 4, 2>;
template <Product kProduct>
using SquareTile = ProductShape<kProduct, 128, 128, 6, 2>;
template <Product kProduct>
using FlatTile = ProductShape<kProduct, 64, 256, 4, 1>;
template <Product kProduct>
using SmallTile = ProductShape<kProduct, 64, 128, 8, 1>;

// (rows, width) row-major.
TensorView matrix(const void* at, std::int64_t rows, std::int64_t width, int box_rows) {
  return {.at = at,
          .type = ElementType::kBf16,
          .rank = 2,
          .extent = {width, rows},
          .stride = {1, width},
          .box = {64, box_rows}};
}
// (count, rows, width) row-major.
TensorView matrices(const void* at, std::int64_t count, std::int64_t rows, std::int64_t width, int box_rows) {
  return {.at = at,
          .type = ElementType::kBf16,
          .rank = 3,
          .extent = {width, rows, count},
          .stride = {1, width, rows * width},
          .box = {64, box_rows, 1}};
}
bool all_bf16(std::initializer_list<In> arrays) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [](In each) { return !each || each.dtype() == Dtype::kBf16; });
}
// What is stored in pieces of 16 bytes, row by row: rows are multiples of that too.
bool in_pieces(const void* at) { return reinterpret_cast<std::uintptr_t>(at) % sizeof(uint4) == 0; }
bool fits_int(std::initializer_list<std::int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(),
                     [](std::int64_t size) { return size > 0 && size < kMaxInt / 2; });
}

// Narrow tiles read A more often; they pay where wide ones leave processors idle or columns empty.
bool narrow_tiles_pay(std::int64_t row_tiles, std::int64_t columns, int processors) {
  const std::int64_t in_wide = ceil_div(columns, 256) * 256;
  const std::int64_t in_narrow = ceil_div(columns, 128) * 128;
  return row_tiles * (in_wide / 256) < processors || in_wide * 4 > in_narrow * 5;
}

// The rows of a product and the columns of C, in tiles.
struct RowPlan {
  std::int64_t groups, rows, columns;
  int processors;
  [[nodiscard]] std::int64_t row_tiles(std::int64_t height) const {  // at most
    return rows / height + std::min(groups, rows);
  }
  [[nodiscard]] std::int64_t tiles(std::int64_t height, std::int64_t width) const {
    return row_tiles(height) * ceil_div(columns, width);
  }
  // Offsets are on the device: the mean decides.
  [[nodiscard]] bool few_rows_each() const { return rows <= 64 * groups; }
  [[nodiscard]] bool narrow(std::int64_t height) const {
    return narrow_tiles_pay(row_tiles(height), columns, processors);
  }
};

template <typename Shape>
void launch_product(OpCall& call, const ProductParameters& parameters, std::int64_t tiles, int processors) {
  const std::int64_t clusters = std::min<std::int64_t>(tiles, processors / Shape::kBlocks);
  call.launch(
      grouped_product<Shape>,
      Grid{.x = clusters * Shape::kBlocks, .threads = kProductThreads, .shared_bytes = Shape::kSharedBytes},
      parameters);
}

struct RowsCall {
  RowPlan plan;
  std::int64_t depth;
  const void* a;
  TensorView b;  // whole; its box is set by the tile
};

// Forward and input gradient.
template <typename Shape>
bool try_rows(OpCall& call, const RowsCall& rows, ProductParameters p) {
  TensorView b = rows.b;
  b.box[1] = Shape::kMajorB == hopper::Major::kK ? Shape::kTileN / Shape::kBlocks : kSlab;
  const TensorView a = matrix(rows.a, rows.plan.rows, rows.depth, Shape::kTileM / Shape::kBlocks);
  const std::int64_t tiles = rows.plan.tiles(Shape::kTileM, Shape::kColumns);
  if (tiles > kMaxTiles || !takes_tensor_map(a) || !takes_tensor_map(b)) return false;
  p.a = make_tensor_map(call, a);
  p.b = make_tensor_map(call, b);
  launch_product<Shape>(call, p, tiles, rows.plan.processors);
  return true;
}

template <Product kProduct>
bool run_rows(OpCall& call, const GroupedMatmul& op) {
  constexpr bool kForward = kProduct == Product::kForward;
  const std::int64_t depth = kForward ? op.k : op.n;
  const std::int64_t columns = kForward ? op.n : op.k;
  const hopper::DeviceTraits device = hopper::device_traits(call);
  if (!device.hopper || !all_bf16({op.a, op.w, op.c}) || !fits_int({op.groups, op.rows, op.n, op.k}))
    return false;
  if (columns % 8 != 0 || !in_pieces(op.c.at())) return false;
  const RowsCall rows{.plan = {op.groups, op.rows, columns, device.processors},
                      .depth = depth,
                      .a = op.a.at(),
                      .b = matrices(op.w.at(), op.groups, op.n, op.k, kSlab)};
  ProductParameters p{};
  p.c.at = op.c.as<Bf16>();
  p.c.width = columns;
  p.c.halves = 1;
  p.offsets = op.offsets;
  p.groups = static_cast<int>(op.groups);
  p.width = static_cast<int>(columns);
  p.depth = static_cast<int>(depth);
  p.into = op.into;
  p.keep_b = hopper::Keep::kNormal;
  if (rows.plan.few_rows_each()) {
    p.keep_b = hopper::Keep::kFirstOut;
    if (rows.plan.narrow(64)) return try_rows<SmallTile<kProduct>>(call, rows, p);
    return try_rows<FlatTile<kProduct>>(call, rows, p);
  }
  if (rows.plan.narrow(128)) return try_rows<SquareTile<kProduct>>(call, rows, p);
  return try_rows<WideTile<kProduct>>(call, rows, p);
}

template <typename Shape>
bool launch_weights(OpCall& call, const ProductParameters& p, int processors) {
  const std::int64_t tiles = p.groups * ceil_div(p.depth, Shape::kTileM) * ceil_div(p.width, Shape::kColumns);
  if (tiles > kMaxTiles) return false;
  launch_product<Shape>(call, p, tiles, processors);
  return true;
}

template <typename Shape>
bool try_glu(OpCall& call, const GroupedGlu& op, ProductParameters p, int processors) {
  const TensorView a = matrix(op.a.at(), op.rows, op.k, Shape::kTileM / Shape::kBlocks);
  const TensorView b = matrices(op.w.at(), op.groups, 2 * op.n, op.k, Shape::kGroupN / 2);
  const RowPlan plan{op.groups, op.rows, op.n, processors};
  const std::int64_t tiles = plan.tiles(Shape::kTileM, Shape::kColumns);
  if (tiles > kMaxTiles || !takes_tensor_map(a) || !takes_tensor_map(b)) return false;
  p.a = make_tensor_map(call, a);
  p.b = make_tensor_map(call, b);
  launch_product<Shape>(call, p, tiles, processors);
  return true;
}

}  // namespace

bool grouped_forward_on_hopper(OpCall& call, const GroupedMatmul& op) {
  return run_rows<Product::kForward>(call, op);
}

bool grouped_input_gradient_on_hopper(OpCall& call, const GroupedMatmul& op) {
  return run_rows<Product::kInputGradient>(call, op);
}

bool grouped_weights_on_hopper(OpCall& call, const GroupedWeightGradient& op) {
  const hopper::DeviceTraits device = hopper::device_traits(call);
  if (!device.hopper || !all_bf16({op.d_c, op.a}) || !fits_int({op.groups, op.rows, op.n, op.k}))
    return false;
  const TensorView d_c = matrix(op.d_c.at(), op.rows, op.n, kSlab);
  const TensorView a = matrix(op.a.at(), op.rows, op.k, kSlab);
  if (!takes_tensor_map(d_c) || !takes_tensor_map(a)) return false;
  if (!in_pieces(op.d_w)) return false;
  ProductParameters p{};
  p.a = make_tensor_map(call, d_c);
  p.b = make_tensor_map(call, a);
  p.d_w = op.d_w;
  p.offsets = op.offsets;
  p.groups = static_cast<int>(op.groups);
  p.width = static_cast<int>(op.k);
  p.depth = static_cast<int>(op.n);
  p.into = op.into;
  if (narrow_tiles_pay(op.groups * ceil_div(op.n, 128), op.k, device.processors)) {
    return launch_weights<SquareTile<Product::kWeightGradient>>(call, p, device.processors);
  }
  return launch_weights<WideTile<Product::kWeightGradient>>(call, p, device.processors);
}

bool grouped_glu_on_hopper(OpCall& call, const GroupedGlu& op) {
  const hopper::DeviceTraits device = hopper::device_traits(call);
  if (!device.hopper || !all_bf16({op.a, op.w, op.y, op.gu})) return false;
  if (!fits_int({op.groups, op.rows, 2 * op.n, op.k})) return false;
  if (op.n % 8 != 0 || !in_pieces(op.y.at()) || !in_pieces(op.gu.at())) return false;
  ProductParameters p{};
  p.c.at = op.y.as<Bf16>();
  p.c.width = op.n;
  p.c.halves = 1;
  p.gu.at = op.gu.as<Bf16>();
  p.gu.width = op.n;
  p.gu.halves = 2;
  p.offsets = op.offsets;
  p.groups = static_cast<int>(op.groups);
  p.width = static_cast<int>(op.n);
  p.depth = static_cast<int>(op.k);
  p.up_row = static_cast<int>(op.n);
  p.activation = op.activation;
  p.keep_b = hopper::Keep::kNormal;
  if (op.rows <= 64 * op.groups) {
    p.keep_b = hopper::Keep::kFirstOut;
    return try_glu<FlatTile<Product::kGlu>>(call, op, p, device.processors);
  }
  return try_glu<WideTile<Product::kGlu>>(call, op, p, device.processors);
}

}  // namespace terrace::trainer::cuda
