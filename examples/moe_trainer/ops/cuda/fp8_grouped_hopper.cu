// The persistent grouped product of Hopper on e4m3: the forward product of grouped_product.cuh with slabs of
// 128 numbers, which are the same 128 bytes. So tiles, clusters, the ring and its loads are those of bf16,
// and only the sums differ.
//
// The matrix units add 8-bit products with fewer bits than fp32 has, and what is lost grows with the length
// of the sum. So every 128 of the summed dimension their sum is taken out and added in fp32. A warpgroup has
// 256 columns at most: a half of them after the other goes through the same 64 registers, beside 128 of whole
// sums. While one warpgroup adds, the other one's products run.
//
// Past the last row of a group lie its neighbour's rows, past the array's end zeros: neither is stored. Past
// the end of the summed dimension both operands are zeros. Scales come in where sums go out.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/fp8_grouped_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/grouped_epilogue.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"

namespace terrace::trainer::cuda {
namespace {

using hopper::ElementType;
using hopper::TensorView;

constexpr int kSlabE4m3 = kRowBytes;  // numbers of the summed dimension, a stage
constexpr int kStepE4m3 = 32;         // of one instruction
constexpr std::int64_t kMaxInt = 0x7fffffff;
constexpr std::int64_t kMaxTiles = kMaxInt / 2;  // a block steps past the last one

// Clusters of two where experts have many rows; low tiles, by single blocks, where they have few.
using WideTile = ProductShape<Product::kForward, 128, 256, 4, 2>;
using SquareTile = ProductShape<Product::kForward, 128, 128, 6, 2>;
using FlatTile = ProductShape<Product::kForward, 64, 256, 4, 1>;
using SmallTile = ProductShape<Product::kForward, 64, 128, 8, 1>;

template <typename Shape>
struct Halves {
  static constexpr int kColumns = Shape::kGroupN < 128 ? Shape::kGroupN : 128;  // of one product
  static constexpr int kCount = Shape::kGroupN / kColumns;
  static constexpr int kSums = kColumns / 2;  // of a thread
  static_assert(kCount * kColumns == Shape::kGroupN);
};

struct Fp8Parameters {
  ProductParameters product;
  const float* a_scale;  // (rows)
  const float* w_scale;  // (groups, width)
};

__device__ int slabs_of_e4m3(const ProductParameters& p) { return (p.depth + kSlabE4m3 - 1) / kSlabE4m3; }

// By one thread.
template <typename Shape>
__device__ void produce_e4m3(const ProductParameters& p, const ProductRing& ring) {
  typename TilesOf<Shape>::type tiles(tile_walk<Shape>(p));
  GroupedTile tile;
  RingPlace<Shape::kStages> place;
  const int slabs = slabs_of_e4m3(p);
  const int step = number_step<Shape>();
  for (int number = first_number<Shape>(); tiles.find(number, &tile); number += step) {
    for (int s = 0; s < slabs; ++s) {
      ring.empty[place.stage].wait(place.parity ^ 1);
      load_slab<Shape>(p, tile, s * kSlabE4m3, ring.stages + place.stage * Shape::kStageBytes,
                       ring.full + place.stage);
      place.next();
    }
  }
}

// One half's products of a slab, complete.
template <typename Shape>
__device__ void multiply_half(const std::byte* stage, const Part<Shape>& part, int half,
                              float (&partial)[Halves<Shape>::kSums]) {
  const hopper::Operand a = hopper::k_major(stage + part.row * kRowBytes);
  const int b_row = part.b_row + half * Halves<Shape>::kColumns;
  const hopper::Operand b = hopper::k_major(stage + Shape::kBytesA + b_row * kRowBytes);
  hopper::keep_registers(partial);
  hopper::fence_wgmma();
#pragma unroll
  for (int k = 0; k < kSlabE4m3 / kStepE4m3; ++k) {
    hopper::wgmma_e4m3<Halves<Shape>::kColumns>(partial, a.advanced(k * hopper::kKMajorStepBytes),
                                                b.advanced(k * hopper::kKMajorStepBytes),
                                                k == 0 ? hopper::Start::kZero : hopper::Start::kAccumulate);
  }
  hopper::commit_wgmma();
  hopper::keep_registers(partial);
}

// The sums of one tile; `meanwhile` runs while the last products do.
template <typename Shape, typename Meanwhile>
__device__ void sum_tile_e4m3(const ProductRing& ring, int slabs, const GroupedTile& tile,
                              const Part<Shape>& part, RingPlace<Shape::kStages>& place,
                              HeadStart<Shape>& head_start, Meanwhile&& meanwhile,
                              float (&sum)[Shape::kGroupN / 2]) {
  using Half = Halves<Shape>;
  if (part.row >= tile.rows_left) {
    pass_tile<Shape>(ring, slabs, place);
    meanwhile();
    return;
  }
#pragma unroll
  for (float& each : sum) each = 0.0F;
  float partial[Half::kSums];
  for (int s = 0; s < slabs; ++s) {
    const std::byte* stage = ring.stages + place.stage * Shape::kStageBytes;
    ring.full[place.stage].wait(place.parity);
#pragma unroll
    for (int half = 0; half < Half::kCount; ++half) {
      multiply_half<Shape>(stage, part, half, partial);
      if (half == Half::kCount - 1) {
        head_start.slab_begun();
        if (s == slabs - 1) meanwhile();
      }
      hopper::wait_wgmma<0>();
      hopper::keep_registers(partial);
      if (half == Half::kCount - 1) release_stage<Shape>(ring.empty + place.stage);
#pragma unroll
      for (int i = 0; i < Half::kSums; ++i) sum[half * Half::kSums + i] += partial[i];
    }
    place.next();
  }
}

// A warp's 16 rows of the tile, times their scales and the columns'.
template <typename Shape>
__device__ void store_scaled(const Fp8Parameters& p, const GroupedTile& tile, const Part<Shape>& part,
                             Staging& staging, float (&sum)[Shape::kGroupN / 2]) {
  constexpr int kEights = Shape::kGroupColumns / 8;
  const int width = static_cast<int>(p.product.c.width);
  const int rows = tile.rows_left - part.warp_row;
  if (rows <= 0) return;
  const int row = tile.first_row + part.warp_row;
  const int upper = staging.lane / 4;
  const float row_scale[2] = {upper < rows ? __ldg(p.a_scale + row + upper) : 0.0F,
                              upper + 8 < rows ? __ldg(p.a_scale + row + upper + 8) : 0.0F};
  const int column0 = tile.first_column + part.column;
  const float* scales = p.w_scale + std::int64_t{tile.group} * width + column0;
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int column = j * 8 + staging.lane % 4 * 2;
    float2 by{};
    if (column0 + column < width) by = __ldg(reinterpret_cast<const float2*>(scales + column));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* pair = sum + j * 4 + half * 2;
      pair[0] = pair[0] * row_scale[half] * by.x;
      pair[1] = pair[1] * row_scale[half] * by.y;
    }
  }
  store_rows<Shape>(p.product, tile, part, staging, sum);
}

template <typename Shape>
__device__ void consume_e4m3(const Fp8Parameters& p, const ProductRing& ring, std::byte* staging_boxes) {
  const Part<Shape> part;
  const int warp = static_cast<int>(threadIdx.x) / 32 - hopper::kWarpgroup / 32;
  HeadStart<Shape> head_start(part.warpgroup);
  Staging staging{.boxes = staging_boxes + warp * 2 * kWarpBoxBytes,
                  .lane = static_cast<int>(threadIdx.x) % 32};
  typename TilesOf<Shape>::type tiles(tile_walk<Shape>(p.product));
  GroupedTile tile{}, next{};
  RingPlace<Shape::kStages> place;
  float sum[Shape::kGroupN / 2];
  const int slabs = slabs_of_e4m3(p.product);
  const int step = number_step<Shape>();
  int number = first_number<Shape>();
  bool more = tiles.find(number, &tile);
  const auto find_next = [&] {
    number += step;
    more = tiles.find(number, &next);
  };
  while (more) {
    sum_tile_e4m3<Shape>(ring, slabs, tile, part, place, head_start, find_next, sum);
    store_scaled<Shape>(p, tile, part, staging, sum);
    tile = next;
  }
  head_start.end();
}

template <typename Shape>
__global__ void __cluster_dims__(Shape::kBlocks, 1, 1) __launch_bounds__(kProductThreads, 1)
    grouped_product_e4m3(const __grid_constant__ Fp8Parameters p) {
#if TERRACE_SM90A
  extern __shared__ std::byte product_shared[];
  // Boxes with the 128-byte swizzle start at multiples of 1024.
  const std::uint32_t misplaced = hopper::shared_address(product_shared) % 1024;
  std::byte* stages = product_shared + (misplaced == 0 ? 0 : 1024 - misplaced);
  std::byte* staging = stages + Shape::kStages * Shape::kStageBytes;
  auto* full = reinterpret_cast<hopper::Barrier*>(staging + Shape::kStagingBytes);
  const ProductRing ring{stages, full, full + Shape::kStages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      ring.full[i].init(1);
      ring.empty[i].init(kConsumerWarps * Shape::kBlocks);
    }
    hopper::fence_barrier_init();
    hopper::prefetch_map(&p.product.a);
    hopper::prefetch_map(&p.product.b);
  }
  sync_blocks<Shape>();
  if (threadIdx.x < hopper::kWarpgroup) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) produce_e4m3<Shape>(p.product, ring);
  } else {
    hopper::take_registers<232>();
    consume_e4m3<Shape>(p, ring, staging);
  }
  sync_blocks<Shape>();
#endif
}

bool at_sixteen(const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; }
bool fits_int(std::initializer_list<std::int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(),
                     [](std::int64_t size) { return size > 0 && size < kMaxInt / 2; });
}

// (rows, width) of one group, or of `groups` of them.
TensorView numbers(const E4m3* at, std::int64_t groups, std::int64_t rows, std::int64_t width) {
  return {.at = at,
          .type = ElementType::kE4m3,
          .rank = groups > 0 ? 3 : 2,
          .extent = {width, rows, groups},
          .stride = {1, width, rows * width},
          .box = {kSlabE4m3, 1, 1}};
}

struct RowPlan {
  const GroupedMatmulFp8& op;
  int processors;
  [[nodiscard]] std::int64_t row_tiles(std::int64_t height) const {  // at most
    return op.rows / height + std::min(op.groups, op.rows);
  }
  // Offsets are on the device: the mean decides.
  [[nodiscard]] bool few_rows_each() const { return op.rows <= 64 * op.groups; }
  // Narrow tiles read A more often; they pay where wide ones leave processors idle or columns empty.
  [[nodiscard]] bool narrow(std::int64_t height) const {
    const std::int64_t wide = ceil_div(op.n, 256), half = ceil_div(op.n, 128);
    return row_tiles(height) * wide < processors || wide * 2 * 4 > half * 5;
  }
};

template <typename Shape>
bool try_shape(OpCall& call, const RowPlan& plan, Fp8Parameters p) {
  const GroupedMatmulFp8& op = plan.op;
  TensorView a = numbers(op.a, 0, op.rows, op.k), b = numbers(op.w, op.groups, op.n, op.k);
  a.box[1] = Shape::kTileM / Shape::kBlocks;
  b.box[1] = Shape::kTileN / Shape::kBlocks;
  const std::int64_t tiles = plan.row_tiles(Shape::kTileM) * ceil_div(op.n, Shape::kColumns);
  if (tiles > kMaxTiles || !takes_tensor_map(a) || !takes_tensor_map(b)) return false;
  p.product.a = make_tensor_map(call, a);
  p.product.b = make_tensor_map(call, b);
  const std::int64_t clusters = std::min<std::int64_t>(tiles, plan.processors / Shape::kBlocks);
  call.launch(
      grouped_product_e4m3<Shape>,
      Grid{.x = clusters * Shape::kBlocks, .threads = kProductThreads, .shared_bytes = Shape::kSharedBytes},
      p);
  return true;
}

}  // namespace

bool grouped_fp8_on_hopper(OpCall& call, const GroupedMatmulFp8& op) {
  const hopper::DeviceTraits device = hopper::device_traits(call);
  if (!device.hopper || op.c.dtype() != Dtype::kBf16) return false;
  if (!fits_int({op.groups, op.rows, op.n, op.k}) || op.n % 8 != 0) return false;
  if (!at_sixteen(op.c.at()) || !at_sixteen(op.w_scale)) return false;
  Fp8Parameters p{};
  p.product.c = {op.c.as<Bf16>(), op.n, 1};
  p.product.offsets = op.offsets;
  p.product.groups = static_cast<int>(op.groups);
  p.product.width = static_cast<int>(op.n);
  p.product.depth = static_cast<int>(op.k);
  p.product.into = op.into;
  p.product.keep_b = hopper::Keep::kNormal;
  p.a_scale = op.a_scale;
  p.w_scale = op.w_scale;
  const RowPlan plan{op, device.processors};
  if (plan.few_rows_each()) {
    p.product.keep_b = hopper::Keep::kFirstOut;
    if (plan.narrow(64)) return try_shape<SmallTile>(call, plan, p);
    return try_shape<FlatTile>(call, plan, p);
  }
  if (plan.narrow(128)) return try_shape<SquareTile>(call, plan, p);
  return try_shape<WideTile>(call, plan, p);
}

}  // namespace terrace::trainer::cuda
