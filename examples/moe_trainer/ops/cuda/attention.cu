// Dense attention: which tokens reach which, the backward pass's statistics of the rows, the sink's gradient,
// and the choice of kernels.
#include <cuda_bf16.h>

#include <cmath>

#include "examples/moe_trainer/ops/cuda/attention.hpp"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/packing.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;

struct FillReach {
  std::int64_t length, stored, window;
  Packing packing;
  std::int32_t* first;
  std::int32_t* last;
};
__global__ void __launch_bounds__(kThreads) fill_reach(FillReach a) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= a.stored) return;
  if (t >= a.length) {
    a.first[t] = static_cast<std::int32_t>(t);
    a.last[t] = static_cast<std::int32_t>(a.length - 1);
    return;
  }
  std::int64_t start = 0, end = a.length;
  if (a.packing) {
    const std::int64_t index = sequence_index(a.packing, t);
    start = a.packing.starts[index];
    end = a.packing.starts[index + 1];
  }
  const std::int64_t window = a.window > 0 ? a.window : a.length;
  a.first[t] = static_cast<std::int32_t>(t - start >= window ? t - window + 1 : start);
  a.last[t] = static_cast<std::int32_t>(end - t > window ? t + window - 1 : end - 1);
}

__device__ float as_float(float x) { return x; }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

struct Prepare {
  std::int64_t batch, heads, length, stored, width;
  const void* o;
  const void* d_o;
  const float* lse;
  float* lse_log2;
  float* delta;
};
// One warp a row (b, t, h); rows past T are set aside.
template <typename T>
__global__ void __launch_bounds__(kThreads) prepare_rows(Prepare a) {
  const std::int64_t row = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (row >= a.batch * a.stored * a.heads) return;
  const std::int64_t head = row % a.heads, t = row / a.heads % a.stored, batch = row / a.heads / a.stored;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t to = (batch * a.heads + head) * a.stored + t;
  if (t >= a.length) {
    if (lane == 0) {
      a.lse_log2[to] = INFINITY;
      a.delta[to] = 0.0F;
    }
    return;
  }
  const std::int64_t from = (batch * a.length + t) * a.heads + head;
  const T* o = static_cast<const T*>(a.o) + from * a.width;
  const T* d_o = static_cast<const T*>(a.d_o) + from * a.width;
  float sum = 0.0F;
  for (std::int64_t c = lane; c < a.width; c += kWarp) sum += as_float(o[c]) * as_float(d_o[c]);
  sum = warp_sum(sum);
  if (lane == 0) {
    a.lse_log2[to] = a.lse[from] * kLog2E;
    a.delta[to] = sum;
  }
}

struct SinkGradient {
  std::int64_t batch, heads, length, stored;
  const float* sink;
  AttentionStatistics statistics;
  float* d_sink;
};
// d_sink -= sum over rows of e^(sink - lse) delta. One block a head.
__global__ void __launch_bounds__(kThreads) add_sink_gradient(SinkGradient a) {
  const std::int64_t head = blockIdx.x;
  const float sink_log2 = a.sink[head] * kLog2E;
  float sum = 0.0F;
  for (std::int64_t batch = 0; batch < a.batch; ++batch) {
    const std::int64_t row = (batch * a.heads + head) * a.stored;
    for (std::int64_t t = threadIdx.x; t < a.length; t += kThreads) {
      sum += exp2f(sink_log2 - a.statistics.lse_log2[row + t]) * a.statistics.delta[row + t];
    }
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) a.d_sink[head] -= sum;
}

}  // namespace

AttentionSizes attention_sizes(OpCall& call, const AttentionShape& s, std::initializer_list<In> arrays) {
  call.set_shape({s.batch, s.length, s.heads, s.key_heads, s.key_width, s.value_width});
  const char* wrong = wrong_with(s);
  call.require(wrong == nullptr, wrong);
  for (const In& array : arrays)
    call.require(array.dtype() == arrays.begin()->dtype(), "arrays of different types");
  const float scale = s.scale != 0 ? s.scale : 1.0F / std::sqrt(static_cast<float>(s.key_width));
  AttentionSizes sizes{.batch = s.batch,
                       .heads = s.heads,
                       .key_heads = s.key_heads,
                       .group = s.group(),
                       .length = static_cast<int>(s.length),
                       .key_width = static_cast<int>(s.key_width),
                       .value_width = static_cast<int>(s.value_width),
                       .scale = scale,
                       .scale_log2 = scale * kLog2E,
                       .q = s.q_rows(),
                       .k = s.k_rows(),
                       .v = s.v_rows(),
                       .o = s.o_rows(),
                       .first = nullptr,
                       .last = nullptr,
                       .stored = ceil_div(s.length, kAttentionPad) * kAttentionPad};
  const bool window = s.window > 0 && s.window < s.length;
  if ((window || s.packing) && s.length > 0) {
    auto* reach = call.scratch<std::int32_t>(2 * sizes.stored);
    sizes.first = reach;
    sizes.last = reach + sizes.stored;
    call.launch(fill_reach, grid_for(sizes.stored, kThreads),
                FillReach{s.length, sizes.stored, s.window, s.packing, reach, reach + sizes.stored});
  }
  return sizes;
}

void launch(OpCall& call, const Attention& op) {
  const AttentionSizes sizes = attention_sizes(call, op.shape, {op.q, op.k, op.v, op.o});
  if (sizes.batch == 0 || sizes.length == 0) return;
  if (!launch_hopper(call, op, sizes)) launch_general(call, op, sizes);
}

void launch(OpCall& call, const AttentionBackward& op) {
  const AttentionSizes sizes =
      attention_sizes(call, op.shape, {op.q, op.k, op.v, op.o, op.d_o, op.d_q, op.d_k, op.d_v});
  if (sizes.batch == 0 || sizes.length == 0) return;
  const std::int64_t rows = sizes.batch * sizes.heads * sizes.stored;
  auto* lse_log2 = call.scratch<float>(rows);
  auto* delta = call.scratch<float>(rows);
  call.launch(op.q.dtype() == Dtype::kF32 ? prepare_rows<float> : prepare_rows<__nv_bfloat16>,
              grid_for(rows * kWarp, kThreads),
              Prepare{sizes.batch, sizes.heads, sizes.length, sizes.stored, sizes.value_width, op.o.at(),
                      op.d_o.at(), op.lse, lse_log2, delta});
  const AttentionStatistics statistics{lse_log2, delta};
  if (!launch_hopper(call, op, sizes, statistics)) launch_general(call, op, sizes, statistics);
  if (op.sink == nullptr || op.d_sink == nullptr) return;
  call.launch(
      add_sink_gradient, Grid{.x = sizes.heads, .threads = kThreads},
      SinkGradient{sizes.batch, sizes.heads, sizes.length, sizes.stored, op.sink, statistics, op.d_sink});
}

}  // namespace terrace::trainer::cuda
