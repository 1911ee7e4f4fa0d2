// Dispatch and combine of expert rows, as gathers: no atomics.
//   gather    out_r = x[source_r / k]                                x: (T, D)   out: (rows, D)
//   sum       out_t [+]= sum over j of weight_tj x[row_tj]           x: (rows, D)   out: (T, D)   weight,
//   row: (T, k) backward  d_x[row_tj] = weight_tj d_out_t,  d_weight_tj = <d_out_t, x[row_tj]>
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSlotsPerBlock = kThreads / kWarp;

__global__ void gather_rows(GatherRows op) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= op.rows * op.width) return;
  const std::int64_t token = op.source[at / op.width] / op.top_k;
  op.out[at] = op.x[token * op.width + at % op.width];
}

__global__ void sum_rows(SumRows op) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= op.tokens * op.width) return;
  const std::int64_t slot0 = at / op.width * op.top_k;
  const std::int64_t column = at % op.width;
  float sum = 0.0F;
  for (std::int64_t j = 0; j < op.top_k; ++j) {
    const float value = op.x[std::int64_t{op.row[slot0 + j]} * op.width + column];
    sum += op.weight == nullptr ? value : op.weight[slot0 + j] * value;
  }
  op.out[at] = op.into == Accumulate::kAdd ? op.out[at] + sum : sum;
}

// One warp a slot (t, j).
__global__ void sum_rows_backward(SumRowsBackward op) {
  const std::int64_t slot = std::int64_t{blockIdx.x} * kSlotsPerBlock + threadIdx.x / kWarp;
  if (slot >= op.tokens * op.top_k) return;
  const std::int64_t row0 = std::int64_t{op.row[slot]} * op.width;
  const float* d_out = op.d_out + slot / op.top_k * op.width;
  const float weight = op.weight == nullptr ? 1.0F : op.weight[slot];
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    if (op.d_weight != nullptr) product += d_out[c] * op.x[row0 + c];
    if (op.d_x != nullptr) op.d_x[row0 + c] = weight * d_out[c];
  }
  if (op.d_weight == nullptr) return;
  const float d_weight = warp_sum(product);
  if (threadIdx.x % kWarp == 0) op.d_weight[slot] = d_weight;
}

}  // namespace

void launch(OpCall& call, const GatherRows& op) {
  call.set_shape({op.rows, op.width, op.top_k});
  call.launch(gather_rows, grid_for(op.rows * op.width, kThreads), op);
}

void launch(OpCall& call, const SumRows& op) {
  call.set_shape({op.tokens, op.width, op.top_k});
  call.launch(sum_rows, grid_for(op.tokens * op.width, kThreads), op);
}

void launch(OpCall& call, const SumRowsBackward& op) {
  call.set_shape({op.tokens, op.width, op.top_k});
  call.launch(sum_rows_backward,
              Grid{.x = ceil_div(op.tokens * op.top_k, kSlotsPerBlock), .threads = kThreads}, op);
}

}  // namespace terrace::trainer::cuda
