// I_ts = HI^-1/2 DI^-1/2 sum_h w_th relu(qI_th . kI_s) for s <= t, and the positions of its k largest,
// ascending
//   qI: (B, T, HI, DI)   kI: (B, T, DI)   w: (B, T, HI)   selected: (B, T, slots)   scores: (B, T, T)
// Scores for as many query rows as fit 256 MiB, but at least 1024, by 64 x 64 tiles in plain fp32 or as in
// dsa_scores_hopper.cu. Then one block a query finds the k-th largest value by its bits, eleven at a time
// from the top, and collects in order what is above it and the first of what equals it.
#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/packing.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"
#include "examples/moe_trainer/ops/cuda/tile.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxRows = 1 << 20;  // the grid counts tiles of them
// However long a row is: fewer blocks would leave multiprocessors idle, and each reads its row several times.
constexpr std::int64_t kLeastRows = 1024;
constexpr int kDigits = 2048;
constexpr int kDigitBits = 11;
constexpr int kFirstShift = 32 - kDigitBits;

template <typename T>
__global__ void __launch_bounds__(kTileThreads) index_scores(DsaScoreRows a) {
  const DsaSizes& sizes = a.sizes;
  const std::int64_t key0 = std::int64_t{blockIdx.x} * kTile;
  const std::int64_t row0 = std::int64_t{blockIdx.y} * kTile;
  const std::int64_t token0 = a.batch * sizes.length + a.first + row0;
  const std::int64_t queries = a.rows - row0 < kTile ? a.rows - row0 : kTile;
  const std::int64_t keys = sizes.length - key0 < kTile ? sizes.length - key0 : kTile;
  if (key0 > a.first + row0 + queries - 1) return;  // all in the future
  const TilePlace at = tile_place();
  const T* weights = a.index_w.as<T>();
  float total[kTilePatch][kTilePatch] = {};
  for (std::int64_t head = 0; head < sizes.index_heads; ++head) {
    const TileOperand<T> q{a.index_q.as<T>() + (token0 * sizes.index_heads + head) * sizes.index_width,
                           queries, sizes.index_heads * sizes.index_width, 1};
    const TileOperand<T> k{a.index_k.as<T>() + (a.batch * sizes.length + key0) * sizes.index_width, keys,
                           sizes.index_width, 1};
    float dot[kTilePatch][kTilePatch] = {};
    accumulate_tile(q, k, sizes.index_width, dot);
    for (int i = 0; i < kTilePatch; ++i) {
      if (at.row + i >= queries) continue;
      const float w = load_float(weights + (token0 + at.row + i) * sizes.index_heads + head);
      for (int j = 0; j < kTilePatch; ++j) total[i][j] += w * fmaxf(dot[i][j], 0.0F);
    }
  }
  for (int i = 0; i < kTilePatch; ++i) {
    for (int j = 0; j < kTilePatch; ++j) {
      if (at.row + i >= queries || at.column + j >= keys) continue;
      a.scores[(row0 + at.row + i) * sizes.length + key0 + at.column + j] = total[i][j] * sizes.index_scale;
    }
  }
}

// One block a query: what it can't see becomes -inf.
__global__ void hide_unseen(DsaScoreRows a) {
  const std::int64_t t = a.first + blockIdx.x, from = sequence_start(a.packing, t);
  float* scores = a.scores + std::int64_t{blockIdx.x} * a.sizes.length;
  for (std::int64_t s = threadIdx.x; s < a.sizes.length; s += kThreads) {
    if (s < from || s > t) scores[s] = -INFINITY;
  }
}

// Unsigned numbers in the order of the floats; both zeros are one.
__device__ unsigned ordered_bits(float value) {
  const unsigned bits = __float_as_uint(value == 0.0F ? 0.0F : value);
  return bits ^ ((bits >> 31) != 0U ? 0xffffffffU : 0x80000000U);
}

// A thread takes four scores at a time, one behind the other.
constexpr int kFour = 4;
constexpr int kStep = kFour * kThreads;
struct FourBits {
  unsigned at[kFour];  // 0 past the end
};
__device__ FourBits four_bits(const float* scores, int first, int count, bool aligned_row) {
  FourBits result{};
  if (aligned_row && first + kFour <= count) {
    const float4 four = *reinterpret_cast<const float4*>(scores + first);
    result = {{ordered_bits(four.x), ordered_bits(four.y), ordered_bits(four.z), ordered_bits(four.w)}};
    return result;
  }
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    if (first + i < count) result.at[i] = ordered_bits(scores[first + i]);
  }
  return result;
}
__device__ bool is_aligned_row(const float* scores) {
  return reinterpret_cast<std::uintptr_t>(scores) % sizeof(float4) == 0;
}

struct Threshold {
  unsigned bits;  // of the k-th largest value
  int equal;      // how many that equal it are among the k
};

// The digit, from the largest down, at which `wanted` numbers are reached, and how many of its own are
// wanted.
__device__ Threshold find_digit(const int (&histogram)[kDigits], int wanted) {
  constexpr int kEach = kDigits / kThreads;
  __shared__ int warp_total[kThreads / kWarp];
  __shared__ Threshold found;
  const int thread = static_cast<int>(threadIdx.x);
  const int top = kDigits - 1 - thread * kEach;  // this thread's digits go down from here
  int mine = 0;
  for (int i = 0; i < kEach; ++i) mine += histogram[top - i];
  int before = mine;  // becomes the sum up to and with this thread
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kFullWarp, before, step);
    if (thread % kWarp >= step) before += other;
  }
  if (thread % kWarp == kWarp - 1) warp_total[thread / kWarp] = before;
  __syncthreads();
  for (int warp = 0; warp < thread / kWarp; ++warp) before += warp_total[warp];
  before -= mine;
  if (before < wanted && wanted <= before + mine) {
    int digit = top;
    int left = wanted - before;
    while (histogram[digit] < left) left -= histogram[digit--];
    found = {static_cast<unsigned>(digit), left};
  }
  __syncthreads();
  return found;
}

// wanted is 1 to count.
__device__ Threshold kth_largest(const float* scores, int count, int wanted) {
  __shared__ int histogram[kDigits];
  const bool aligned_row = is_aligned_row(scores);
  unsigned known = 0;
  unsigned known_mask = 0;
  for (int shift = kFirstShift; shift >= 0; shift = shift == 0 ? -1 : max(0, shift - kDigitBits)) {
    // The last digit overlaps the one before by a bit, which is known by then.
    for (int digit = static_cast<int>(threadIdx.x); digit < kDigits; digit += kThreads) histogram[digit] = 0;
    __syncthreads();
    for (int s = static_cast<int>(threadIdx.x) * kFour; s < count; s += kStep) {
      const FourBits bits = four_bits(scores, s, count, aligned_row);
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        // Counts do not depend on the order in which they are counted.
        if (s + i < count && (bits.at[i] & known_mask) == known) {
          atomicAdd(&histogram[(bits.at[i] >> shift) & (kDigits - 1U)], 1);
        }
      }
    }
    __syncthreads();
    const Threshold digit = find_digit(histogram, wanted);
    known |= digit.bits << shift;
    wanted = digit.equal;
    known_mask |= (kDigits - 1U) << shift;
  }
  return {known, wanted};
}

// The sum over threads of lower index; *total gets the sum over all. `warp_totals` may be used again in the
// call after the next.
__device__ unsigned sum_before(unsigned mine, unsigned (&warp_totals)[kThreads / kWarp], unsigned* total) {
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned before = mine;
#pragma unroll
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const unsigned other = __shfl_up_sync(kFullWarp, before, step);
    if (lane >= step) before += other;
  }
  if (lane == kWarp - 1) warp_totals[warp] = before;
  __syncthreads();
  before -= mine;
  *total = 0;
#pragma unroll
  for (unsigned i = 0; i < kThreads / kWarp; ++i) {
    if (i < warp) before += warp_totals[i];
    *total += warp_totals[i];
  }
  return before;
}

// In order: what is above the threshold, and of what equals it the first `equal`.
__device__ void collect(const float* scores, int count, int from, const Threshold& threshold,
                        std::int32_t* out) {
  constexpr unsigned kOneEqual = 1U << 16;  // the lower half counts what is above the threshold
  __shared__ unsigned warp_totals[2][kThreads / kWarp];
  const bool aligned_row = is_aligned_row(scores);
  int above = 0;
  int equal = 0;
  for (int base = 0, turn = 0; base < count; base += kStep, turn ^= 1) {
    const int first = base + static_cast<int>(threadIdx.x) * kFour;
    const FourBits bits = four_bits(scores, first, count, aligned_row);
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      if (first + i >= count) continue;
      mine += bits.at[i] > threshold.bits ? 1U : bits.at[i] == threshold.bits ? kOneEqual : 0U;
    }
    unsigned total = 0;
    const unsigned before = sum_before(mine, warp_totals[turn], &total);
    int above_here = above + static_cast<int>(before % kOneEqual);
    int equal_here = equal + static_cast<int>(before / kOneEqual);
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      if (first + i >= count) continue;
      if (bits.at[i] > threshold.bits) {
        out[above_here++ + min(equal_here, threshold.equal)] = from + first + i;
      } else if (bits.at[i] == threshold.bits) {
        if (equal_here < threshold.equal) out[above_here + equal_here] = from + first + i;
        ++equal_here;
      }
    }
    above += static_cast<int>(total % kOneEqual);
    equal += static_cast<int>(total / kOneEqual);
  }
}

// One block a query of one sequence.
__global__ void __launch_bounds__(kThreads) select_positions(DsaScoreRows a, std::int32_t* selected) {
  const std::int64_t t = a.first + blockIdx.x;
  const int slots = static_cast<int>(a.sizes.slots);
  const auto from = static_cast<int>(sequence_start(a.packing, t));
  const int count = static_cast<int>(t) + 1 - from;
  const float* scores = a.scores + std::int64_t{blockIdx.x} * a.sizes.length + from;
  std::int32_t* out = selected + (a.batch * a.sizes.length + t) * slots;
  if (count <= slots) {
    for (int j = static_cast<int>(threadIdx.x); j < slots; j += kThreads) out[j] = j < count ? from + j : -1;
    return;
  }
  collect(scores, count, from, kth_largest(scores, count, slots), out);
}

}  // namespace

DsaSizes dsa_sizes(OpCall& call, const DsaShape& shape) {
  call.set_shape({shape.batch, shape.length, shape.heads, shape.key_width, shape.value_width,
                  shape.index_heads, shape.index_width, shape.top_k});
  call.require(shape.length <= 0x7fffffff, "longer than 32-bit positions count");
  call.require(shape.top_k >= 1, "top_k must be at least 1");
  call.require(!shape.packing || shape.batch == 1, "packed sequences are one batch row");
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
  if (sizes.tokens() <= 0) return;
  const Dtype type = op.in.index_q.dtype();
  call.require(op.in.index_k.dtype() == type && op.in.index_w.dtype() == type,
               "the indexer's arrays are of one type");
  const bool fast = scores_fit_hopper(call, op);
  const std::int64_t fitting = kDsaScoreBytes / (sizes.length * static_cast<std::int64_t>(sizeof(float)));
  const std::int64_t rows = std::clamp<std::int64_t>(fitting, kLeastRows, kMaxRows);
  float* scratch =
      op.scores == nullptr ? call.scratch<float>(std::min(rows, sizes.length) * sizes.length) : nullptr;
  for (std::int64_t batch = 0; batch < sizes.batch; ++batch) {
    for (std::int64_t first = 0; first < sizes.length; first += rows) {
      const std::int64_t count = std::min(rows, sizes.length - first);
      float* scores =
          op.scores == nullptr ? scratch : op.scores + (batch * sizes.length + first) * sizes.length;
      const DsaScoreRows score_rows{.sizes = sizes,
                                    .index_q = op.in.index_q,
                                    .index_k = op.in.index_k,
                                    .index_w = op.in.index_w,
                                    .packing = op.shape.packing,
                                    .batch = batch,
                                    .first = first,
                                    .rows = count,
                                    .scores = scores};
      const Grid tiles{
          .x = ceil_div(first + count, kTile), .y = ceil_div(count, kTile), .threads = kTileThreads};
      if (fast) {
        launch_hopper_scores(call, score_rows);
      } else if (type == Dtype::kF32) {
        call.launch(index_scores<float>, tiles, score_rows);
      } else {
        call.launch(index_scores<Bf16>, tiles, score_rows);
      }
      if (op.scores != nullptr) call.launch(hide_unseen, Grid{.x = count, .threads = kThreads}, score_rows);
      call.launch(select_positions, Grid{.x = count, .threads = kThreads}, score_rows, op.selected);
    }
  }
}

}  // namespace terrace::trainer::cuda
