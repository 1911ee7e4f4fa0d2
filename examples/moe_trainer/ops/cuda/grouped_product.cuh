// The persistent grouped product of Hopper: bf16 operands, fp32 sums, one block a multiprocessor.
//
// A producer warp fills a ring of stages by the copy engine, a slab of 64 of the summed dimension a stage;
// two warpgroups multiply. A stage holds A (kTileM, 64) and B (kTileN, 64), each as boxes with rows of 128
// bytes:
//   forward, GLU     A = a_e (rows, k)   K-major     B = w_e (n, k)   K-major
//   input gradient   A = d_c_e (rows, n) K-major     B = w_e (n, k)   MN-major: k is the column, n is summed
//   weight gradient  A = d_c_e (rows, n) MN-major    B = a_e (rows, k) MN-major: rows are summed
// A load reads past a group's last row into its neighbour's rows or into garbage. Where rows are C's rows
// those are not stored; where they are summed, the last slab is zeroed past the end in shared memory, on both
// sides, for zero times NaN is NaN. GLU: the columns of one warpgroup's B are half gate and half up of the
// same outputs, so that both sums of an output are in one thread.
#pragma once

#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/glu_math.cuh"
#include "examples/moe_trainer/ops/cuda/grouped_tiles.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tma.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/wgmma.cuh"

namespace terrace::trainer::cuda {

enum class Product : std::uint8_t { kForward, kInputGradient, kWeightGradient, kGlu };

inline constexpr int kSlab = 64;       // of the summed dimension, a stage
inline constexpr int kRowBytes = 128;  // of every box: 64 bf16 or 32 fp32
inline constexpr int kBoxBytes = 64 * kRowBytes;
inline constexpr int kProductThreads = 3 * hopper::kWarpgroup;
inline constexpr int kConsumerThreads = 2 * hopper::kWarpgroup;
inline constexpr int kConsumerWarps = kConsumerThreads / 32;

template <Product kProductOf, int kTileMOf, int kTileNOf, int kStagesOf>
struct ProductShape {
  static constexpr Product kProduct = kProductOf;
  static constexpr int kTileM = kTileMOf;  // rows of C: 64 or 128
  static constexpr int kTileN = kTileNOf;  // rows of B
  static constexpr int kStages = kStagesOf;
  static constexpr int kRowGroups = kTileM / 64;           // warpgroups down the rows
  static constexpr int kGroupN = kTileN * kRowGroups / 2;  // rows of B of one warpgroup
  static constexpr int kColumns = kProduct == Product::kGlu ? kTileN / 2 : kTileN;
  static constexpr int kGroupColumns = kColumns * kRowGroups / 2;
  static constexpr bool kRowsOfA = kProduct != Product::kWeightGradient;  // A's rows are C's
  static constexpr hopper::Major kMajorA = kRowsOfA ? hopper::Major::kK : hopper::Major::kMN;
  static constexpr hopper::Major kMajorB =
      kProduct == Product::kForward || kProduct == Product::kGlu ? hopper::Major::kK : hopper::Major::kMN;
  static constexpr int kBytesA = kTileM * kRowBytes;
  static constexpr int kBytesB = kTileN * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kStagingBytes = 2 * kBoxBytes;  // of one warpgroup
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kStagingBytes + 2 * kStages * 8;
  static_assert(kTileM == 64 || kTileM == 128);
  static_assert(kSharedBytes <= 227 * 1024);
};

// C as the store sees it: rows of `halves` times `width`, (width, halves, rows) to the map.
struct RowsOut {
  CUtensorMap map;
  Bf16* at;
  std::int64_t width;
  int halves;
};

struct ProductParameters {
  CUtensorMap a, b;
  CUtensorMap d_w;  // weight gradient: (k, n, groups) fp32
  RowsOut c;        // the others
  RowsOut gu;       // GLU; null `at`: not wanted
  const std::int32_t* offsets;
  int groups;
  int width;   // columns of C
  int depth;   // of a sum; of a weight gradient C's rows, n
  int up_row;  // GLU: the first row of w_e that is up
  Accumulate into;
  GluActivation activation;
  hopper::Keep keep_b;
};

template <typename Shape>
struct TilesOf {
  using type = RowTiles<Shape::kTileM, Shape::kColumns>;
};
template <int kTileM, int kTileN, int kStages>
struct TilesOf<ProductShape<Product::kWeightGradient, kTileM, kTileN, kStages>> {
  using type = WeightTiles<kTileM, kTileN>;
};

__device__ inline int first_tile() { return static_cast<int>(blockIdx.x); }
__device__ inline int tile_step() { return static_cast<int>(gridDim.x); }

__device__ inline int slabs_of(const GroupedTile& tile) {
  return (tile.depth_end - tile.depth_begin + kSlab - 1) / kSlab;
}

// A ring position and the parity of its round.
template <int kStages>
struct RingPlace {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct ProductRing {
  std::byte* stages;
  hopper::Barrier* full;   // 1 arrival and the stage's bytes
  hopper::Barrier* empty;  // one arrival of each consumer warp
};

template <typename Shape>
__device__ void load_slab(const ProductParameters& p, const GroupedTile& tile, int depth, std::byte* stage,
                          hopper::Barrier* full) {
  using hopper::At2, hopper::At3;
  std::byte* b = stage + Shape::kBytesA;
  full->arrive_expecting(Shape::kStageBytes);
  if constexpr (Shape::kRowsOfA) {
    hopper::load_box(stage, &p.a, full, At2{depth, tile.first_row});
  } else {
#pragma unroll
    for (int i = 0; i < Shape::kTileM / 64; ++i) {
      hopper::load_box(stage + i * kBoxBytes, &p.a, full, At2{tile.first_row + i * 64, depth});
    }
  }
  if constexpr (Shape::kProduct == Product::kForward) {
    hopper::load_box(b, &p.b, full, At3{depth, tile.first_column, tile.group}, p.keep_b);
  } else if constexpr (Shape::kProduct == Product::kGlu) {
    constexpr int kHalf = Shape::kGroupN / 2;
#pragma unroll
    for (int i = 0; i < Shape::kTileN / Shape::kGroupN; ++i) {
      const int row = tile.first_column + i * kHalf;
      std::byte* gate = b + i * Shape::kGroupN * kRowBytes;
      hopper::load_box(gate, &p.b, full, At3{depth, row, tile.group}, p.keep_b);
      hopper::load_box(gate + kHalf * kRowBytes, &p.b, full, At3{depth, p.up_row + row, tile.group},
                       p.keep_b);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Shape::kTileN / 64; ++i) {
      const int column = tile.first_column + i * 64;
      if constexpr (Shape::kProduct == Product::kInputGradient) {
        hopper::load_box(b + i * kBoxBytes, &p.b, full, At3{column, depth, tile.group}, p.keep_b);
      } else {
        hopper::load_box(b + i * kBoxBytes, &p.b, full, At2{column, depth});
      }
    }
  }
}

// By one thread.
template <typename Shape>
__device__ void produce(const ProductParameters& p, const ProductRing& ring) {
  typename TilesOf<Shape>::type tiles(p.offsets, p.groups, p.width, p.depth);
  GroupedTile tile;
  RingPlace<Shape::kStages> place;
  for (int number = first_tile(); tiles.find(number, &tile); number += tile_step()) {
    const int slabs = slabs_of(tile);
    for (int s = 0; s < slabs; ++s) {
      ring.empty[place.stage].wait(place.parity ^ 1);
      load_slab<Shape>(p, tile, tile.depth_begin + s * kSlab, ring.stages + place.stage * Shape::kStageBytes,
                       ring.full + place.stage);
      place.next();
    }
  }
}

// Zeroes rows [from, 64) of every box of a stage, by all consumers: rows of a box are summed over.
template <typename Shape>
__device__ void zero_tail(std::byte* stage, int from) {
  constexpr int kBoxes = (Shape::kTileM + Shape::kTileN) / 64;
  constexpr int kPieces = kRowBytes / 16;
  const int thread = static_cast<int>(threadIdx.x) - hopper::kWarpgroup;
  const int pieces = (kSlab - from) * kPieces;  // of one box, one behind the other
  for (int i = thread; i < pieces * kBoxes; i += kConsumerThreads) {
    std::byte* at = stage + i / pieces * kBoxBytes + from * kRowBytes + i % pieces * 16;
    *reinterpret_cast<uint4*>(at) = uint4{0, 0, 0, 0};
  }
  hopper::fence_shared_for_async();
  hopper::named_barrier_sync(1, kConsumerThreads);
}

// Which part of a tile this warpgroup has.
template <typename Shape>
struct Part {
  int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup - 1;
  int row = warpgroup % Shape::kRowGroups * 64;                       // of C
  int b_row = warpgroup / Shape::kRowGroups * Shape::kGroupN;         // of B
  int column = warpgroup / Shape::kRowGroups * Shape::kGroupColumns;  // of C
};

template <typename Shape>
__device__ void multiply_slab(const std::byte* stage, const Part<Shape>& part, bool first,
                              float (&sum)[Shape::kGroupN / 2]) {
  using hopper::Major;
  const std::byte* a_at = stage + part.row * kRowBytes;
  const std::byte* b_at = stage + Shape::kBytesA + part.b_row * kRowBytes;
  const hopper::Operand a =
      Shape::kMajorA == Major::kK ? hopper::k_major(a_at) : hopper::mn_major(a_at, kBoxBytes);
  const hopper::Operand b =
      Shape::kMajorB == Major::kK ? hopper::k_major(b_at) : hopper::mn_major(b_at, kBoxBytes);
  constexpr int kStepA = Shape::kMajorA == Major::kK ? hopper::kKMajorStepBytes : hopper::kMnMajorStepBytes;
  constexpr int kStepB = Shape::kMajorB == Major::kK ? hopper::kKMajorStepBytes : hopper::kMnMajorStepBytes;
  hopper::keep_registers(sum);
  hopper::fence_wgmma();
#pragma unroll
  for (int k = 0; k < kSlab / 16; ++k) {
    hopper::wgmma_bf16<Shape::kGroupN, Shape::kMajorA, Shape::kMajorB>(
        sum, a.advanced(k * kStepA), b.advanced(k * kStepB),
        first && k == 0 ? hopper::Start::kZero : hopper::Start::kAccumulate);
  }
  hopper::commit_wgmma();
  hopper::keep_registers(sum);
}

// The sums of one tile. One slab's products are in flight while the next one's are issued.
template <typename Shape>
__device__ void sum_tile(const ProductRing& ring, const GroupedTile& tile, const Part<Shape>& part,
                         RingPlace<Shape::kStages>& place, float (&sum)[Shape::kGroupN / 2]) {
  const int slabs = slabs_of(tile);
  if constexpr (!Shape::kRowsOfA) {  // there may be no slab
#pragma unroll
    for (float& each : sum) each = 0.0F;
  }
  const bool signals = threadIdx.x % 32 == 0;
  int last = 0;
  for (int s = 0; s < slabs; ++s) {
    std::byte* stage = ring.stages + place.stage * Shape::kStageBytes;
    ring.full[place.stage].wait(place.parity);
    if constexpr (!Shape::kRowsOfA) {
      const int rows = tile.depth_end - tile.depth_begin - s * kSlab;
      if (rows < kSlab) zero_tail<Shape>(stage, rows);
    }
    multiply_slab<Shape>(stage, part, Shape::kRowsOfA && s == 0, sum);
    if (s > 0) {
      hopper::wait_wgmma<1>();
      if (signals) ring.empty[last].arrive();
    }
    last = place.stage;
    place.next();
  }
  hopper::wait_wgmma<0>();
  hopper::keep_registers(sum);
  if (signals && slabs > 0) ring.empty[last].arrive();
}

}  // namespace terrace::trainer::cuda
