#include "examples/moe_trainer/ops/cuda/loss_rows.hpp"

#include <cuda_bf16.h>

#include "examples/moe_trainer/ops/cuda/loss_plan.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int32_t kIgnored = -100;
constexpr std::int64_t kWordsOfBlock = 4096;  // of one row, for the elementwise kernels
constexpr int kVector = 8;                    // bf16 numbers in 16 bytes

__device__ void store(float* at, float value) { *at = value; }
__device__ void store(Bf16* at, float value) {
  *reinterpret_cast<__nv_bfloat16*>(at) = __float2bfloat16_rn(value);
}

__global__ void row_states(const RowsOf rows) {
  const std::int64_t row = blockIdx.x;
  const LogitPart* part = rows.part + row * rows.parts;
  float largest = -INFINITY;
  for (std::int64_t i = threadIdx.x; i < rows.parts; i += kThreads) largest = fmaxf(largest, part[i].largest);
  const float top = block_max<kThreads>(largest);
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < rows.parts; i += kThreads) {
    sum += part[i].sum * expf(part[i].largest - top);
  }
  const float total = block_sum<kThreads>(sum);
  if (threadIdx.x != 0) return;
  const std::int32_t label = rows.labels[row];
  const bool counted = label != kIgnored;
  const bool known = label >= 0 && label < rows.vocabulary;
  const float log_total = logf(total);
  const float below_top = known ? rows.label_logits[row] - top : 0.0F;
  rows.losses[row] = known ? log_total - below_top : counted ? NAN : 0.0F;
  rows.states[row] = RowState{.top = top,
                              .factor = counted ? rows.gradient_scale / total : 0.0F,
                              .label_gradient = expm1f(below_top - log_total) * rows.gradient_scale,
                              .label = known ? label : -1};
}

// out += sum of x, by one block.
__global__ void add_sum(const float* x, std::int64_t count, float* out) {
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += x[i];
  const float total = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *out += total;
}

// One block a row.
__global__ void fold(const RowsOf rows, const LogitsSlice slice, const float* logits) {
  const std::int64_t row = blockIdx.x;
  const float* z = logits + row * slice.pitch;
  float mine = -INFINITY;
  for (std::int64_t i = threadIdx.x; i < slice.words; i += kThreads) mine = fmaxf(mine, z[i]);
  const float largest = block_max<kThreads>(mine);
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < slice.words; i += kThreads) sum += expf(z[i] - largest);
  const float total = block_sum<kThreads>(sum);
  if (threadIdx.x != 0) return;
  rows.part[row * rows.parts + slice.part] = {largest, total};
  const std::int64_t label = rows.labels[row] - slice.first_word;
  if (label >= 0 && label < slice.words) rows.label_logits[row] = z[label];
}

struct Place {
  std::int64_t row, word;  // the first word of the block's
};
__device__ Place place_of(std::int64_t words) {
  const std::int64_t blocks = (words + kWordsOfBlock - 1) / kWordsOfBlock;
  return {blockIdx.x / blocks, blockIdx.x % blocks * kWordsOfBlock};
}

template <typename T>
__global__ void gradient(const RowsOf rows, const LogitsSlice slice, const float* logits, T* d_logits) {
  const Place place = place_of(slice.words);
  const RowState state = rows.states[place.row];
  const std::int64_t label = state.label < 0 ? -1 : state.label - slice.first_word;
  const std::int64_t start = place.row * slice.pitch;
  for (std::int64_t i = threadIdx.x; i < kWordsOfBlock && place.word + i < slice.words; i += kThreads) {
    const std::int64_t word = place.word + i;
    float value = state.factor == 0.0F ? 0.0F : expf(logits[start + word] - state.top) * state.factor;
    if (word == label) value = state.label_gradient;
    store(d_logits + start + word, value);
  }
}

__global__ void scale_exponentials(const RowsOf rows, std::int64_t pitch, Bf16* values) {
  const Place place = place_of(pitch);
  const RowState state = rows.states[place.row];
  const LogitPart* part = rows.part + place.row * rows.parts;
#pragma unroll
  for (int i = 0; i < kWordsOfBlock / (kThreads * kVector); ++i) {
    const std::int64_t word = place.word + (i * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (word >= pitch) continue;
    auto* at = reinterpret_cast<uint4*>(values + place.row * pitch + word);
    uint4 packed = *at;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
    const float factor = expf(part[word / kLossTileWords].largest - state.top) * state.factor;
    const std::int64_t label = state.label - word;
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      float2 pair = __bfloat1622float2(pairs[j]);
      pair.x = state.factor == 0.0F ? 0.0F : pair.x * factor;
      pair.y = state.factor == 0.0F ? 0.0F : pair.y * factor;
      if (label == 2 * j) pair.x = state.label_gradient;
      if (label == 2 * j + 1) pair.y = state.label_gradient;
      pairs[j] = __float22bfloat162_rn(pair);
    }
    *at = packed;
  }
}

__global__ void narrow_each(const float* from, std::int64_t count, Bf16* to) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) store(to + i, from[i]);
}

Grid elementwise_grid(std::int64_t rows, std::int64_t words) {
  return {.x = rows * ceil_div(words, kWordsOfBlock), .threads = kThreads};
}

}  // namespace

void finish_rows(OpCall& call, const RowsOf& rows, float* loss_sum) {
  call.launch(row_states, Grid{.x = rows.rows, .threads = kThreads}, rows);
  call.launch(add_sum, Grid{.threads = kThreads}, rows.losses, rows.rows, loss_sum);
}

void fold_logits(OpCall& call, const RowsOf& rows, const LogitsSlice& slice, const float* logits) {
  call.launch(fold, Grid{.x = rows.rows, .threads = kThreads}, rows, slice, logits);
}

void logits_gradient(OpCall& call, const RowsOf& rows, const LogitsSlice& slice, const float* logits,
                     Out d_logits) {
  const Grid grid = elementwise_grid(rows.rows, slice.words);
  if (d_logits.dtype() == Dtype::kF32) {
    call.launch(gradient<float>, grid, rows, slice, logits, d_logits.as<float>());
  } else {
    call.launch(gradient<Bf16>, grid, rows, slice, logits, d_logits.as<Bf16>());
  }
}

void exponentials_gradient(OpCall& call, const RowsOf& rows, std::int64_t pitch, Bf16* values) {
  call.launch(scale_exponentials, elementwise_grid(rows.rows, pitch), rows, pitch, values);
}

void narrow(OpCall& call, const float* from, std::int64_t count, Bf16* to) {
  call.launch(narrow_each, grid_for(count, kThreads), from, count, to);
}

}  // namespace terrace::trainer::cuda
