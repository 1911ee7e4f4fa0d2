// The persistent grouped product of Hopper: bf16 operands, fp32 sums, one block a multiprocessor.
//
// A producer warp fills a ring of stages by the copy engine, a slab of 64 of the summed dimension a stage;
// two warpgroups multiply. Large tiles are computed by clusters of two blocks: of the operand that both need
// each loads one half for both, so that L2 is read less often. A stage holds A (kTileM, 64) and B (kTileN,
// 64), each as boxes with rows of 128 bytes:
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
#include "examples/moe_trainer/ops/cuda/hopper/cluster.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tma.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/wgmma.cuh"

namespace terrace::trainer::cuda {

enum class Product : std::uint8_t { kForward, kInputGradient, kWeightGradient, kGlu };

inline constexpr int kSlab = 64;       // of the summed dimension, a stage
inline constexpr int kRowBytes = 128;  // of every box: 64 bf16 or 32 fp32
inline constexpr int kBoxBytes = 64 * kRowBytes;
inline constexpr int kWarpBoxBytes = 16 * kRowBytes;  // of the rows that one warp has sums of
inline constexpr int kProductThreads = 3 * hopper::kWarpgroup;
inline constexpr int kConsumerThreads = 2 * hopper::kWarpgroup;
inline constexpr int kConsumerWarps = kConsumerThreads / 32;

template <Product kProductOf, int kTileMOf, int kTileNOf, int kStagesOf, int kBlocksOf>
struct ProductShape {
  static constexpr Product kProduct = kProductOf;
  static constexpr int kTileM = kTileMOf;  // rows of C: 64 or 128
  static constexpr int kTileN = kTileNOf;  // rows of B
  static constexpr int kStages = kStagesOf;
  static constexpr int kBlocks = kBlocksOf;                // of a cluster: 1 or 2
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
  // Slabs; as long as storing a tile takes, half of one where that needs no more.
  static constexpr int kHeadStart = kProduct == Product::kGlu || kProduct == Product::kWeightGradient ? 2 : 1;
  // Two boxes a warp, where C is staged.
  static constexpr int kStagingBytes = kRowsOfA ? 2 * kConsumerWarps * kWarpBoxBytes : 0;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStagingBytes + 2 * kStages * 8;
  static_assert(kTileM == 64 || kTileM == 128);
  static_assert(kBlocks == 1 || (kTileM == 128 && kTileN % 128 == 0));
  static_assert(kSharedBytes <= 227 * 1024);
};

// C as the store sees it: rows of `halves` times `width`.
struct RowsOut {
  Bf16* at;
  std::int64_t width;
  int halves;
};

struct ProductParameters {
  CUtensorMap a, b;  // a box of a K-major operand is a block's share of a slab
  float* d_w;        // weight gradient: (groups, n, k)
  RowsOut c;         // the others
  RowsOut gu;        // GLU; null `at`: not wanted
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
  using type = RowTiles<Shape::kTileM, Shape::kColumns, Shape::kBlocks>;
};
template <int kTileM, int kTileN, int kStages, int kBlocks>
struct TilesOf<ProductShape<Product::kWeightGradient, kTileM, kTileN, kStages, kBlocks>> {
  using type = WeightTiles<kTileM, kTileN, kBlocks>;
};

template <typename Shape>
__device__ int block_in_cluster() {
  return Shape::kBlocks == 1 ? 0 : static_cast<int>(hopper::block_in_cluster());
}
template <typename Shape>
__device__ TileWalk tile_walk(const ProductParameters& p) {
  return {p.offsets, p.groups, p.width, p.depth, p.depth, block_in_cluster<Shape>()};
}
// What a cluster starts with, and how far it steps. Both blocks of a cluster have neighbouring numbers.
template <typename Shape>
__device__ int first_number() {
  return static_cast<int>(blockIdx.x) / Shape::kBlocks;
}
template <typename Shape>
__device__ int number_step() {
  return static_cast<int>(gridDim.x) / Shape::kBlocks;
}

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
  hopper::Barrier* empty;  // one arrival of each consumer warp of the cluster
};

// One load, for this block or for both of its cluster.
enum class Reach : std::uint8_t { kBlock, kCluster };
struct BoxLoad {
  hopper::Barrier* full;
  Reach reach;
  hopper::Keep keep;

  template <typename At>
  __device__ void operator()(std::byte* to, const CUtensorMap& map, At at) const {
    if (reach == Reach::kCluster) {
      hopper::load_box_into(0b11, to, &map, full, at, keep);
    } else {
      hopper::load_box(to, &map, full, at, keep);
    }
  }
};

// Share `share` of kBlocks of a slab of A.
template <typename Shape>
__device__ void load_a(const ProductParameters& p, const GroupedTile& tile, int depth, int share,
                       std::byte* a, const BoxLoad& load) {
  constexpr int kRows = Shape::kTileM / Shape::kBlocks;
  const int row = tile.first_row + share * kRows;
  std::byte* to = a + share * kRows * kRowBytes;
  if constexpr (Shape::kRowsOfA) {
    load(to, p.a, hopper::At2{depth, row});
  } else {
#pragma unroll
    for (int i = 0; i < kRows / 64; ++i) load(to + i * kBoxBytes, p.a, hopper::At2{row + i * 64, depth});
  }
}

// Share `share` of kBlocks of a slab of B.
template <typename Shape>
__device__ void load_b(const ProductParameters& p, const GroupedTile& tile, int depth, int share,
                       std::byte* b, const BoxLoad& load) {
  constexpr int kRows = Shape::kTileN / Shape::kBlocks;
  std::byte* to = b + share * kRows * kRowBytes;
  if constexpr (Shape::kProduct == Product::kForward) {
    load(to, p.b, hopper::At3{depth, tile.first_column + share * kRows, tile.group});
  } else if constexpr (Shape::kProduct == Product::kGlu) {
    // Gate and up by turns, half of a warpgroup's rows each.
    constexpr int kHalf = Shape::kGroupN / 2;
#pragma unroll
    for (int i = 0; i < kRows / kHalf; ++i) {
      const int half = share * (kRows / kHalf) + i;
      const int row = half % 2 * p.up_row + tile.first_column + half / 2 * kHalf;
      load(to + i * kHalf * kRowBytes, p.b, hopper::At3{depth, row, tile.group});
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows / 64; ++i) {
      const int column = tile.first_column + share * kRows + i * 64;
      if constexpr (Shape::kProduct == Product::kInputGradient) {
        load(to + i * kBoxBytes, p.b, hopper::At3{column, depth, tile.group});
      } else {
        load(to + i * kBoxBytes, p.b, hopper::At2{column, depth});
      }
    }
  }
}

// This block's loads of a slab: all of what is its own, its share of what the cluster has in common.
template <typename Shape>
__device__ void load_slab(const ProductParameters& p, const GroupedTile& tile, int depth, std::byte* stage,
                          hopper::Barrier* full) {
  full->arrive_expecting(Shape::kStageBytes);
  const int block = block_in_cluster<Shape>();
  const auto reach = [&](SharedOperand operand) {
    return Shape::kBlocks > 1 && tile.shared == operand ? Reach::kCluster : Reach::kBlock;
  };
  const BoxLoad a{full, reach(SharedOperand::kA), hopper::Keep::kNormal};
  const BoxLoad b{full, reach(SharedOperand::kB), p.keep_b};
#pragma unroll
  for (int share = 0; share < Shape::kBlocks; ++share) {
    if (a.reach == Reach::kBlock || share == block) load_a<Shape>(p, tile, depth, share, stage, a);
  }
#pragma unroll
  for (int share = 0; share < Shape::kBlocks; ++share) {
    if (b.reach == Reach::kBlock || share == block)
      load_b<Shape>(p, tile, depth, share, stage + Shape::kBytesA, b);
  }
}

// By one thread.
template <typename Shape>
__device__ void produce(const ProductParameters& p, const ProductRing& ring) {
  typename TilesOf<Shape>::type tiles(tile_walk<Shape>(p));
  GroupedTile tile;
  RingPlace<Shape::kStages> place;
  const int step = number_step<Shape>();
  for (int number = first_number<Shape>(); tiles.find(number, &tile); number += step) {
    const int slabs = slabs_of(tile);
    for (int s = 0; s < slabs; ++s) {
      ring.empty[place.stage].wait(place.parity ^ 1);
      load_slab<Shape>(p, tile, tile.depth_begin + s * kSlab, ring.stages + place.stage * Shape::kStageBytes,
                       ring.full + place.stage);
      place.next();
    }
  }
}

// Which part of a tile this warpgroup has.
template <typename Shape>
struct Part {
  int warpgroup = static_cast<int>(threadIdx.x) / hopper::kWarpgroup - 1;
  int row = warpgroup % Shape::kRowGroups * 64;  // of C
  int warp_row = row + static_cast<int>(threadIdx.x) % hopper::kWarpgroup / 32 * 16;
  int b_row = warpgroup / Shape::kRowGroups * Shape::kGroupN;         // of B
  int column = warpgroup / Shape::kRowGroups * Shape::kGroupColumns;  // of C
};

// Zeroes rows [from, 64) of every box of a stage that this warpgroup reads: rows of a box are summed over.
// B is zeroed by both warpgroups, neither waits for the other; zeros over zeros do not harm a reader.
template <typename Shape>
__device__ void zero_tail(std::byte* stage, const Part<Shape>& part, int from) {
  constexpr int kPieces = kRowBytes / 16;
  std::byte* a = stage + part.row * kRowBytes;
  std::byte* b = stage + Shape::kBytesA + part.b_row * kRowBytes;
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  for (int i = from * kPieces + thread; i < kSlab * kPieces; i += hopper::kWarpgroup) {
    *reinterpret_cast<uint4*>(a + i * 16) = uint4{0, 0, 0, 0};
#pragma unroll
    for (int box = 0; box < Shape::kGroupN / 64; ++box) {
      *reinterpret_cast<uint4*>(b + box * kBoxBytes + i * 16) = uint4{0, 0, 0, 0};
    }
  }
  hopper::fence_shared_for_async();
  hopper::named_barrier_sync(2 + part.warpgroup, hopper::kWarpgroup);
}

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

// By every consumer thread: its warp has read a stage. Every block whose loads reach here waits for it.
template <typename Shape>
__device__ void release_stage(hopper::Barrier* empty) {
  const std::uint32_t lane = threadIdx.x % 32;
  if constexpr (Shape::kBlocks == 1) {
    if (lane == 0) empty->arrive();
  } else {
    if (lane < Shape::kBlocks) hopper::arrive_in_block(empty, lane);
  }
}

// Two warpgroups in step would store together, and nobody would multiply meanwhile. The first one gets a head
// start of a few slabs, once; from then on one multiplies while the other stores, and so it stays ahead.
template <typename Shape>
class HeadStart {
 public:
  // The second warpgroup waits here.
  explicit __device__ HeadStart(int warpgroup) : slabs_left_(warpgroup == 0 ? Shape::kHeadStart + 1 : 0) {
    if (warpgroup != 0) hopper::named_barrier_sync(kBarrier, kConsumerThreads);
  }
  // The products of a slab are under way, those of the slab before are done.
  __device__ void slab_begun() {
    if (slabs_left_ > 0 && --slabs_left_ == 0) hopper::named_barrier_arrive(kBarrier, kConsumerThreads);
  }
  // There were not that many.
  __device__ void end() {
    if (slabs_left_ > 0) hopper::named_barrier_arrive(kBarrier, kConsumerThreads);
  }

 private:
  static constexpr int kBarrier = 1;
  static_assert(Shape::kHeadStart < Shape::kStages);  // stages that the second does not hand back
  int slabs_left_;
};

// A tile that has no rows for this warpgroup: the other one has the matrix units to itself.
template <typename Shape>
__device__ void pass_tile(const ProductRing& ring, int slabs, RingPlace<Shape::kStages>& place) {
  for (int s = 0; s < slabs; ++s) {
    ring.full[place.stage].wait(place.parity);
    __syncwarp();  // no lane is left waiting for a phase that may pass
    release_stage<Shape>(ring.empty + place.stage);
    place.next();
  }
}

// The sums of one tile. One slab's products are in flight while the next one's are issued, and the last one's
// while `meanwhile` runs.
template <typename Shape, typename Meanwhile>
__device__ void sum_tile(const ProductRing& ring, const GroupedTile& tile, const Part<Shape>& part,
                         RingPlace<Shape::kStages>& place, HeadStart<Shape>& head_start,
                         Meanwhile&& meanwhile, float (&sum)[Shape::kGroupN / 2]) {
  const int slabs = slabs_of(tile);
  if constexpr (Shape::kRowsOfA) {
    if (part.row >= tile.rows_left) {
      pass_tile<Shape>(ring, slabs, place);
      meanwhile();
      return;
    }
  } else {  // there may be no slab
#pragma unroll
    for (float& each : sum) each = 0.0F;
  }
  int last = 0;
  for (int s = 0; s < slabs; ++s) {
    std::byte* stage = ring.stages + place.stage * Shape::kStageBytes;
    ring.full[place.stage].wait(place.parity);
    if constexpr (!Shape::kRowsOfA) {
      const int rows = tile.depth_end - tile.depth_begin - s * kSlab;
      if (rows < kSlab) zero_tail<Shape>(stage, part, rows);
    }
    multiply_slab<Shape>(stage, part, Shape::kRowsOfA && s == 0, sum);
    if (s > 0) {
      hopper::wait_wgmma<1>();
      release_stage<Shape>(ring.empty + last);
    }
    head_start.slab_begun();
    last = place.stage;
    place.next();
  }
  meanwhile();
  hopper::wait_wgmma<0>();
  hopper::keep_registers(sum);
  if (slabs > 0) release_stage<Shape>(ring.empty + last);
}

}  // namespace terrace::trainer::cuda
