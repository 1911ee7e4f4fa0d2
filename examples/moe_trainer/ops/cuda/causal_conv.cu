// p[t] = sum_j w[j] x[t - taps + 1 + j], zero before the start;  y = silu(p)
//   x, y: (B, T, C)   w: (C, taps)
// d_p = d_y silu'(p);  d_x[t] = sum_j w[j] d_p[t + taps - 1 - j];  d_w[j] = sum over b, t of d_p[t] x[t -
// taps + 1 + j]
#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

struct ConvShape {
  std::int64_t batch, length, channels, taps;
  [[nodiscard]] __host__ __device__ std::int64_t elements() const { return batch * length * channels; }
};

// The convolution at element `at` of (B, T, C).
__device__ float convolve(const ConvShape& shape, const float* x, const float* w, std::int64_t at) {
  const std::int64_t channel = at % shape.channels;
  const std::int64_t t = at / shape.channels % shape.length;
  float sum = 0.0F;
  for (std::int64_t j = 0; j < shape.taps; ++j) {
    const std::int64_t back = shape.taps - 1 - j;
    if (back <= t) sum += w[channel * shape.taps + j] * x[at - back * shape.channels];
  }
  return sum;
}

__global__ void conv_forward(ConvShape shape, const float* x, const float* w, float* y) {
  const std::int64_t at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= shape.elements()) return;
  const float p = convolve(shape, x, w, at);
  y[at] = p * sigmoid(p);
}

__global__ void conv_activation_backward(ConvShape shape, const float* x, const float* w, const float* d_y,
                                         float* d_p) {
  const std::int64_t at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= shape.elements()) return;
  const float p = convolve(shape, x, w, at);
  const float s = sigmoid(p);
  d_p[at] = d_y[at] * s * (1.0F + p * (1.0F - s));
}

__global__ void conv_input_backward(ConvShape shape, const float* w, const float* d_p, float* d_x) {
  const std::int64_t at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= shape.elements()) return;
  const std::int64_t channel = at % shape.channels;
  const std::int64_t t = at / shape.channels % shape.length;
  float sum = 0.0F;
  for (std::int64_t j = 0; j < shape.taps; ++j) {
    const std::int64_t ahead = shape.taps - 1 - j;
    if (t + ahead < shape.length) sum += w[channel * shape.taps + j] * d_p[at + ahead * shape.channels];
  }
  d_x[at] = sum;
}

// Row: a position (b, t); column: channel * taps + j.
struct WeightTerm {
  ConvShape shape;
  const float* x;
  const float* d_p;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t channel = column / shape.taps;
    const std::int64_t back = shape.taps - 1 - column % shape.taps;
    const std::int64_t at = row * shape.channels + channel;
    return back <= row % shape.length ? d_p[at] * x[at - back * shape.channels] : 0.0F;
  }
};

}  // namespace

void launch(OpCall& call, const CausalConv& op) {
  call.set_shape({op.batch, op.length, op.channels, op.taps});
  const ConvShape shape{op.batch, op.length, op.channels, op.taps};
  call.launch(conv_forward, grid_for(shape.elements()), shape, op.x, op.w, op.y);
}

void launch(OpCall& call, const CausalConvBackward& op) {
  call.set_shape({op.batch, op.length, op.channels, op.taps});
  const ConvShape shape{op.batch, op.length, op.channels, op.taps};
  auto* d_p = call.scratch<float>(shape.elements());
  const Grid grid = grid_for(shape.elements());
  call.launch(conv_activation_backward, grid, shape, op.x, op.w, op.d_y, d_p);
  if (op.d_x != nullptr) call.launch(conv_input_backward, grid, shape, op.w, d_p, op.d_x);
  if (op.d_w == nullptr) return;
  add_column_sums(call, WeightTerm{shape, op.x, d_p}, op.batch * op.length, op.channels * op.taps, op.d_w);
}

}  // namespace terrace::trainer::cuda
