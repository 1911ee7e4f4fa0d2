// out += sum x^2: a block sums every gridDim-th group of numbers, one block the blocks' sums.
#include <algorithm>

#include "examples/moe_trainer/ops/cuda/fours.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // groups of four whose loads are under way together
constexpr std::int64_t kMaxPartials = 1056;

// out += sum of x, by one block.
__global__ void add_sum(const float* x, std::int64_t count, float* out) {
  float sum = 0.0F;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += x[i];
  const float total = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *out += total;
}

__global__ void square_partials(In x, Fours fours, float* partial) {
  const std::int64_t stride = 4 * std::int64_t{gridDim.x} * kThreads;
  float sums[kAtOnce] = {};
  for (std::int64_t i = fours.first(); i < fours.count; i += kAtOnce * stride) {
    float4 four[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) four[k] = fours.load(x, i + k * stride);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      sums[k] +=
          (four[k].x * four[k].x + four[k].y * four[k].y) + (four[k].z * four[k].z + four[k].w * four[k].w);
    }
  }
  const float total = block_sum<kThreads>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

}  // namespace

void launch(OpCall& call, const SumOfSquares& op) {
  call.set_shape({op.count});
  const std::int64_t blocks =
      std::min(ceil_div(op.count, std::int64_t{kThreads} * 4 * kAtOnce), kMaxPartials);
  if (blocks <= 0) return;
  auto* partial = call.scratch<float>(blocks);
  call.launch(square_partials, Grid{.x = blocks, .threads = kThreads}, op.x, fours_of(op.count, op.x),
              partial);
  call.launch(add_sum, Grid{.threads = kThreads}, partial, blocks, op.out);
}

}  // namespace terrace::trainer::cuda
