// A block makes tiles of 128 rows by 256 words, 64 of the width at a time. One thread loads both operands by
// the copy engine into a ring of four stages; two warpgroups multiply 64 rows each, and turn their sums into
// the result while the loads for the next tile run ahead.
//
// Tiles go row by row inside groups of rows small enough that their part of `hidden` stays in the L2 cache;
// `weight` then passes through once a group.
#include "examples/moe_trainer/ops/cuda/loss_tiles.hpp"

#include <cuda_bf16.h>

#include <algorithm>
#include <limits>

#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tensor_map.hpp"
#include "examples/moe_trainer/ops/cuda/hopper/tma.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/wgmma.cuh"
#include "examples/moe_trainer/ops/cuda/loss_plan.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kRows = static_cast<int>(kLossTileRows);
constexpr int kWords = static_cast<int>(kLossTileWords);
constexpr int kStep = 64;  // of the width: rows of 128 bytes
constexpr int kStages = 4;
constexpr int kConsumers = 2;
constexpr int kConsumerRows = kRows / kConsumers;
constexpr int kThreads = (1 + kConsumers) * hopper::kWarpgroup;
constexpr int kConsumerWarps = kConsumers * hopper::kWarpgroup / kWarp;
constexpr int kSums = kWords / 2;  // of one thread: 64 rows by kWords over 128 threads
constexpr std::int64_t kGroupRows = 2048;
constexpr std::uintptr_t kStageAlign = 1024;
constexpr float kLog2E = 1.4426950408889634F;

struct Ring {
  Bf16 hidden[kStages][kRows * kStep];
  Bf16 weight[kStages][kWords * kStep];
  hopper::Barrier full[kStages], empty[kStages];
};
constexpr std::uint32_t kStageBytes = sizeof(Ring::hidden[0]) + sizeof(Ring::weight[0]);
constexpr std::size_t kSharedBytes = sizeof(Ring) + kStageAlign;
static_assert(sizeof(Ring::hidden[0]) % kStageAlign == 0 && sizeof(Ring::weight[0]) % kStageAlign == 0);

struct Work {
  TileMaps maps;
  RowsOf rows;
  TileRange range;
  int row_tiles, word_tiles, group_tiles;  // group_tiles: of rows
};

struct Tile {
  int row, word;  // counted in tiles
};
__device__ Tile tile_at(const Work& work, int index) {
  const int of_group = work.group_tiles * work.word_tiles;
  const int first = index / of_group * work.group_tiles;
  const int rows = min(work.group_tiles, work.row_tiles - first);
  const int inside = index % of_group;
  return {first + inside % rows, inside / rows};
}

// Which stage of the ring is next, and the parity of the round.
struct Turn {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

__device__ void load_tiles(const Work& work, Ring& ring) {
  const int tiles = work.row_tiles * work.word_tiles;
  const auto width = static_cast<int>(work.range.width);
  Turn turn;
  for (int index = static_cast<int>(blockIdx.x); index < tiles; index += static_cast<int>(gridDim.x)) {
    const Tile tile = tile_at(work, index);
    const auto row = static_cast<std::int32_t>(work.range.first_row + std::int64_t{tile.row} * kRows);
    const auto word = static_cast<std::int32_t>(work.range.first_word + std::int64_t{tile.word} * kWords);
    for (int at = 0; at < width; at += kStep) {
      hopper::Barrier* full = &ring.full[turn.stage];
      ring.empty[turn.stage].wait(turn.parity ^ 1);
      full->arrive_expecting(kStageBytes);
      hopper::load_box(ring.hidden[turn.stage], &work.maps.hidden, full, hopper::At2{at, row},
                       hopper::Keep::kLastOut);
      hopper::load_box(ring.weight[turn.stage], &work.maps.weight, full, hopper::At2{at, word});
      turn.advance();
    }
  }
}

// sums = this warpgroup's 64 rows of the tile.
__device__ void multiply(const Work& work, Ring& ring, int consumer, Turn& turn, float (&sums)[kSums]) {
  const hopper::Operand hidden = hopper::k_major(ring.hidden[0] + consumer * kConsumerRows * kStep);
  const hopper::Operand weight = hopper::k_major(ring.weight[0]);
  const bool speaks = threadIdx.x % kWarp == 0;
  const auto width = static_cast<int>(work.range.width);
  int before = 0;
  for (int at = 0; at < width; at += kStep) {
    ring.full[turn.stage].wait(turn.parity);
    const hopper::Operand a = hidden.advanced(turn.stage * static_cast<int>(sizeof(Ring::hidden[0])));
    const hopper::Operand b = weight.advanced(turn.stage * static_cast<int>(sizeof(Ring::weight[0])));
    hopper::fence_wgmma();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      hopper::wgmma_bf16<kWords, hopper::Major::kK, hopper::Major::kK>(
          sums, a.advanced(k * hopper::kKMajorStepBytes), b.advanced(k * hopper::kKMajorStepBytes),
          at == 0 && k == 0 ? hopper::Start::kZero : hopper::Start::kAccumulate);
    }
    hopper::commit_wgmma();
    hopper::wait_wgmma<1>();  // the step before has been read
    if (at > 0 && speaks) ring.empty[before].arrive();
    before = turn.stage;
    turn.advance();
  }
  hopper::wait_wgmma<0>();
  hopper::keep_registers(sums);
  if (speaks) ring.empty[before].arrive();
}

__device__ float exp2_fast(float x) {
  float result = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A thread holds two rows of the tile, kHalf 0 and 1, and of each the words 8 j + 2 (lane % 4) and the next.
template <int kHalf>
__device__ float& sum_at(float (&sums)[kSums], int pair, int which) {
  return sums[4 * pair + 2 * kHalf + which];
}
constexpr int kPairs = kWords / 8;

struct RowPlace {
  std::int64_t row;  // in the chunk
  bool inside;
  int lane;                // of the four that share the row
  int words;               // of the tile that exist
  std::int64_t first;      // the tile's first word, in the vocabulary
  std::int64_t out, tile;  // where its row of `out` starts; the tile's number
};

__device__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}
__device__ float quad_sum(float value) {
  value += __shfl_xor_sync(kFullWarp, value, 1);
  return value + __shfl_xor_sync(kFullWarp, value, 2);
}

// The four lanes of a row each hold words[i] of piece i; after it, lane i holds piece i of all four.
__device__ void transpose_quad(std::uint32_t (&words)[4], int lane) {
  const bool odd = (lane & 1) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const std::uint32_t got = __shfl_xor_sync(kFullWarp, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = got;
  }
  const bool high = (lane & 2) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t got = __shfl_xor_sync(kFullWarp, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = got;
  }
}

// A row of the tile as bf16, 64 bytes at a time by its four lanes.
template <int kHalf>
__device__ void store_row(const Work& work, const RowPlace& place, float (&sums)[kSums]) {
  Bf16* row = work.range.out + place.out;
#pragma unroll
  for (int group = 0; group < kPairs / 4; ++group) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int pair = 4 * group + i;
      const __nv_bfloat162 packed =
          __floats2bfloat162_rn(sum_at<kHalf>(sums, pair, 0), sum_at<kHalf>(sums, pair, 1));
      words[i] = *reinterpret_cast<const std::uint32_t*>(&packed);
    }
    transpose_quad(words, place.lane);
    if (place.inside) {
      // Streamed: the operands need the cache more.
      __stcs(reinterpret_cast<uint4*>(row + 32 * group + 8 * place.lane),
             make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

template <int kHalf>
__device__ void keep_label_logit(const Work& work, const RowPlace& place, float (&sums)[kSums]) {
  if (!place.inside) return;
  const std::int64_t label = work.rows.labels[place.row] - place.first;
  if (label < 0 || label >= place.words) return;
  const int mine = static_cast<int>(label) - 2 * place.lane;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    if (mine == 8 * pair) work.rows.label_logits[place.row] = sum_at<kHalf>(sums, pair, 0);
    if (mine == 8 * pair + 1) work.rows.label_logits[place.row] = sum_at<kHalf>(sums, pair, 1);
  }
}

// The row's part; leaves e^(logit - largest) in the sums.
template <int kHalf>
__device__ void make_part(const Work& work, const RowPlace& place, float (&sums)[kSums]) {
  if (place.words < kWords) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (8 * pair + 2 * place.lane >= place.words) sum_at<kHalf>(sums, pair, 0) = -INFINITY;
      if (8 * pair + 2 * place.lane + 1 >= place.words) sum_at<kHalf>(sums, pair, 1) = -INFINITY;
    }
  }
  float largest = -INFINITY;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    largest = fmaxf(largest, fmaxf(sum_at<kHalf>(sums, pair, 0), sum_at<kHalf>(sums, pair, 1)));
  }
  largest = quad_max(largest);
  const float scaled = largest * kLog2E;
  float total[2] = {};
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float& value = sum_at<kHalf>(sums, pair, which);
      value = exp2_fast(fmaf(value, kLog2E, -scaled));
      total[which] += value;
    }
  }
  const float sum = quad_sum(total[0] + total[1]);
  if (place.inside && place.lane == 0) {
    work.rows.part[place.row * work.rows.parts + place.tile] = {largest, sum};
  }
}

template <int kHalf>
__device__ void make_gradient(const Work& work, const RowPlace& place, float (&sums)[kSums]) {
  const RowState state = place.inside ? work.rows.states[place.row] : RowState{0.0F, 0.0F, 0.0F, -1};
  const float scaled = state.top * kLog2E;
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float& value = sum_at<kHalf>(sums, pair, which);
      value = state.factor == 0.0F ? 0.0F : exp2_fast(fmaf(value, kLog2E, -scaled)) * state.factor;
    }
  }
  store_row<kHalf>(work, place, sums);
  // By the lane that has just stored this word with others.
  const std::int64_t label = state.label < 0 ? -1 : state.label - place.first;
  if (label >= 0 && label < place.words && label % 32 / 8 == place.lane) {
    reinterpret_cast<__nv_bfloat16*>(work.range.out)[place.out + label] =
        __float2bfloat16_rn(state.label_gradient);
  }
}

template <TileResult kResult, int kHalf>
__device__ void finish_half(const Work& work, const Tile& tile, int consumer, float (&sums)[kSums]) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const int row_of_tile = consumer * kConsumerRows + thread / kWarp * 16 + thread % kWarp / 4 + 8 * kHalf;
  RowPlace place{.row = std::int64_t{tile.row} * kRows + row_of_tile};
  place.inside = place.row < work.rows.rows;
  place.lane = thread % 4;
  place.words = static_cast<int>(min(work.range.words - std::int64_t{tile.word} * kWords, kLossTileWords));
  place.first = work.range.first_word + std::int64_t{tile.word} * kWords;
  place.out = place.row * work.range.pitch + std::int64_t{tile.word} * kWords;
  place.tile = tile.word;
  if constexpr (kResult == TileResult::kGradient) {
    make_gradient<kHalf>(work, place, sums);
  } else {
    keep_label_logit<kHalf>(work, place, sums);
    make_part<kHalf>(work, place, sums);
    if constexpr (kResult == TileResult::kPartsAndExponentials) store_row<kHalf>(work, place, sums);
  }
}

template <TileResult kResult>
__global__ void __launch_bounds__(kThreads, 1) make_tiles(const __grid_constant__ Work work) {
#if !TERRACE_SM90A
  __trap();  // not the code that this device should run: stop rather than leave the result unwritten
#endif
  extern __shared__ unsigned char shared[];
  const std::uint32_t start = hopper::shared_address(shared);
  Ring& ring = *reinterpret_cast<Ring*>(shared + (kStageAlign - start % kStageAlign) % kStageAlign);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ring.full[stage].init(1);
      ring.empty[stage].init(kConsumerWarps);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  const int role = static_cast<int>(threadIdx.x) / hopper::kWarpgroup;
  if (role == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) load_tiles(work, ring);
  } else {
    hopper::take_registers<232>();
    const int tiles = work.row_tiles * work.word_tiles;
    Turn turn;
    float sums[kSums];
    for (int index = static_cast<int>(blockIdx.x); index < tiles; index += static_cast<int>(gridDim.x)) {
      const Tile tile = tile_at(work, index);
      multiply(work, ring, role - 1, turn, sums);
      finish_half<kResult, 0>(work, tile, role - 1, sums);
      finish_half<kResult, 1>(work, tile, role - 1, sums);
    }
  }
}

hopper::TensorView view_of(const Bf16* at, std::int64_t rows, std::int64_t width, int box_rows) {
  return {.at = at,
          .type = hopper::ElementType::kBf16,
          .rank = 2,
          .extent = {width, rows},
          .stride = {1, width},
          .box = {kStep, box_rows}};
}

}  // namespace

bool take_tiles(const TileMatrices& matrices) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - kStep;
  return matrices.tokens <= kMost && matrices.vocabulary <= kMost && matrices.width <= kMost &&
         hopper::takes_tensor_map(view_of(matrices.hidden, matrices.tokens, matrices.width, kRows)) &&
         hopper::takes_tensor_map(view_of(matrices.weight, matrices.vocabulary, matrices.width, kWords));
}

TileMaps make_tile_maps(OpCall& call, const TileMatrices& matrices) {
  return {
      hopper::make_tensor_map(call, view_of(matrices.hidden, matrices.tokens, matrices.width, kRows)),
      hopper::make_tensor_map(call, view_of(matrices.weight, matrices.vocabulary, matrices.width, kWords))};
}

void launch_tiles(OpCall& call, TileResult result, const TileMaps& maps, const RowsOf& rows,
                  const TileRange& range) {
  const std::int64_t row_tiles = ceil_div(rows.rows, kLossTileRows);
  const std::int64_t word_tiles = ceil_div(range.words, kLossTileWords);
  const std::int64_t groups = ceil_div(row_tiles, kGroupRows / kLossTileRows);
  call.require(row_tiles * word_tiles <= std::numeric_limits<std::int32_t>::max(), "fewer than 2^31 tiles");
  const Work work{.maps = maps,
                  .rows = rows,
                  .range = range,
                  .row_tiles = static_cast<int>(row_tiles),
                  .word_tiles = static_cast<int>(word_tiles),
                  .group_tiles = static_cast<int>(ceil_div(row_tiles, groups))};
  const std::int64_t processors = hopper::device_traits(call).processors;
  const Grid grid{
      .x = std::min(row_tiles * word_tiles, processors), .threads = kThreads, .shared_bytes = kSharedBytes};
  switch (result) {
    case TileResult::kParts:
      return call.launch(make_tiles<TileResult::kParts>, grid, work);
    case TileResult::kPartsAndExponentials:
      return call.launch(make_tiles<TileResult::kPartsAndExponentials>, grid, work);
    case TileResult::kGradient:
      return call.launch(make_tiles<TileResult::kGradient>, grid, work);
  }
}

}  // namespace terrace::trainer::cuda
