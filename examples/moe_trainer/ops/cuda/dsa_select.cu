// I_ts = HI^-1/2 DI^-1/2 sum_h w_th relu(qI_th . kI_s) for s <= t, and the positions of its k largest,
// ascending
//   qI: (B, T, HI, DI)   kI: (B, T, DI)   w: (B, T, HI)   selected: (B, T, slots)   scores: (B, T, T)
// Scores by 64 x 64 tiles for as many query rows as fit 64 MiB. Then one block a query finds the k-th largest
// value by its bits, eight at a time from the top, and collects in order what is above it and the first of
// what equals it.
#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"
#include "examples/moe_trainer/ops/cuda/tile.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDigits = 256;
constexpr int kDigitBits = 8;

struct ScoreRows {
  DsaSizes sizes;
  const float* index_q;
  const float* index_k;
  const float* index_w;
  std::int64_t batch, first, rows;  // queries first .. first + rows of one sequence
  float* scores;                    // (rows, T)
};

__global__ void __launch_bounds__(kTileThreads) index_scores(ScoreRows a) {
  const DsaSizes& sizes = a.sizes;
  const std::int64_t key0 = std::int64_t{blockIdx.x} * kTile;
  const std::int64_t row0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t token0 = a.batch * sizes.length + a.first + row0;
  const std::int64_t queries = a.rows - row0 < kTile ? a.rows - row0 : kTile;
  const std::int64_t keys = sizes.length - key0 < kTile ? sizes.length - key0 : kTile;
  const TilePlace at = tile_place();
  float total[kTilePatch][kTilePatch] = {};
  const bool any_causal = key0 <= a.first + row0 + queries - 1;
  for (std::int64_t head = 0; any_causal && head < sizes.index_heads; ++head) {
    const TileOperand q{a.index_q + (token0 * sizes.index_heads + head) * sizes.index_width, queries,
                        sizes.index_heads * sizes.index_width, 1};
    const TileOperand k{a.index_k + (a.batch * sizes.length + key0) * sizes.index_width, keys,
                        sizes.index_width, 1};
    float dot[kTilePatch][kTilePatch] = {};
    accumulate_tile(q, k, sizes.index_width, dot);
    for (int i = 0; i < kTilePatch; ++i) {
      if (at.row + i >= queries) continue;
      const float w = a.index_w[(token0 + at.row + i) * sizes.index_heads + head];
      for (int j = 0; j < kTilePatch; ++j) total[i][j] += w * fmaxf(dot[i][j], 0.0F);
    }
  }
  for (int i = 0; i < kTilePatch; ++i) {
    for (int j = 0; j < kTilePatch; ++j) {
      if (at.row + i >= queries || at.column + j >= keys) continue;
      const bool causal = key0 + at.column + j <= a.first + row0 + at.row + i;
      a.scores[(row0 + at.row + i) * sizes.length + key0 + at.column + j] =
          causal ? total[i][j] * sizes.index_scale : -INFINITY;
    }
  }
}

// Unsigned numbers in the order of the floats; both zeros are one.
__device__ unsigned ordered_bits(float value) {
  const unsigned bits = __float_as_uint(value == 0.0F ? 0.0F : value);
  return bits ^ ((bits >> 31) != 0U ? 0xffffffffU : 0x80000000U);
}

struct Threshold {
  unsigned bits;  // of the k-th largest value
  int equal;      // how many that equal it are among the k
};
// wanted <= count.
__device__ Threshold kth_largest(const float* scores, int count, int wanted) {
  __shared__ int histogram[kDigits];
  __shared__ Threshold found;
  unsigned known = 0;
  unsigned known_mask = 0;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) histogram[digit] = 0;
    __syncthreads();
    for (int s = static_cast<int>(threadIdx.x); s < count; s += kThreads) {
      const unsigned bits = ordered_bits(scores[s]);
      // Counts do not depend on the order in which they are counted.
      if ((bits & known_mask) == known) atomicAdd(&histogram[(bits >> shift) & (kDigits - 1U)], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1;
      while (digit > 0 && histogram[digit] < wanted) wanted -= histogram[digit--];
      found = {known | (static_cast<unsigned>(digit) << shift), wanted};
    }
    __syncthreads();
    known = found.bits;
    wanted = found.equal;
    known_mask |= (kDigits - 1U) << shift;
  }
  return {known, wanted};
}

// One block a query of one sequence.
__global__ void select_positions(ScoreRows a, std::int32_t* selected) {
  const int t = static_cast<int>(a.first + blockIdx.x);
  const int slots = static_cast<int>(a.sizes.slots);
  const int causal = t + 1;
  const float* scores = a.scores + std::int64_t{blockIdx.x} * a.sizes.length;
  std::int32_t* out = selected + (a.batch * a.sizes.length + t) * slots;
  if (causal <= slots) {
    for (int j = static_cast<int>(threadIdx.x); j < slots; j += kThreads) out[j] = j < causal ? j : -1;
    return;
  }
  const Threshold threshold = kth_largest(scores, causal, slots);
  int placed = 0;
  int equal_seen = 0;
  for (int base = 0; base < causal && placed < slots; base += kThreads) {
    const int s = base + static_cast<int>(threadIdx.x);
    const unsigned bits = s < causal ? ordered_bits(scores[s]) : 0U;
    const bool equal = s < causal && bits == threshold.bits;
    int equal_here = 0;
    const int equal_rank = equal_seen + block_rank<kThreads>(equal, &equal_here);
    const bool take = (s < causal && bits > threshold.bits) || (equal && equal_rank < threshold.equal);
    int taken_here = 0;
    const int place = placed + block_rank<kThreads>(take, &taken_here);
    if (take) out[place] = s;
    equal_seen += equal_here;
    placed += taken_here;
  }
}

}  // namespace

DsaSizes dsa_sizes(OpCall& call, const DsaShape& shape) {
  call.set_shape({shape.batch, shape.length, shape.heads, shape.key_width, shape.value_width,
                  shape.index_heads, shape.index_width, shape.top_k});
  call.require(shape.length <= 0x7fffffff, "longer than 32-bit positions count");
  call.require(shape.top_k >= 1, "top_k must be at least 1");
  const double index_numbers =
      static_cast<double>(shape.index_heads) * static_cast<double>(shape.index_width);
  const float scale = shape.scale != 0.0F
                          ? shape.scale
                          : static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.key_width)));
  return {.batch = shape.batch,
          .length = shape.length,
          .heads = shape.heads,
          .key_width = shape.key_width,
          .value_width = shape.value_width,
          .index_heads = shape.index_heads,
          .index_width = shape.index_width,
          .slots = shape.slots(),
          .scale = scale,
          .index_scale = index_numbers > 0 ? static_cast<float>(1.0 / std::sqrt(index_numbers)) : 0.0F};
}

std::int64_t dsa_tokens_per_turn(const DsaSizes& sizes, std::int64_t floats_per_token) {
  const std::int64_t bytes =
      std::max<std::int64_t>(1, floats_per_token) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t tokens = std::max<std::int64_t>(1, sizes.batch * sizes.length);
  return std::clamp<std::int64_t>(kDsaScratchBytes / bytes, 1, tokens);
}

void launch(OpCall& call, const DsaSelect& op) {
  const DsaSizes sizes = dsa_sizes(call, op.shape);
  if (sizes.length <= 0) return;
  const std::int64_t rows = std::min(dsa_tokens_per_turn(sizes, sizes.length), sizes.length);
  float* scratch = op.scores == nullptr ? call.scratch<float>(rows * sizes.length) : nullptr;
  for (std::int64_t batch = 0; batch < sizes.batch; ++batch) {
    for (std::int64_t first = 0; first < sizes.length; first += rows) {
      const std::int64_t count = std::min(rows, sizes.length - first);
      float* scores =
          op.scores == nullptr ? scratch : op.scores + (batch * sizes.length + first) * sizes.length;
      const ScoreRows score_rows{.sizes = sizes,
                                 .index_q = op.in.index_q,
                                 .index_k = op.in.index_k,
                                 .index_w = op.in.index_w,
                                 .batch = batch,
                                 .first = first,
                                 .rows = count,
                                 .scores = scores};
      call.launch(
          index_scores,
          Grid{.x = ceil_div(sizes.length, kTile), .y = ceil_div(count, kTile), .threads = kTileThreads},
          score_rows);
      call.launch(select_positions, Grid{.x = count, .threads = kThreads}, score_rows, op.selected);
    }
  }
}

}  // namespace terrace::trainer::cuda
