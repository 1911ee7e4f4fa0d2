// y = x r w,  r = (mean x^2 + eps)^-1/2          x, y: (rows, width)   w: (width)
// g = d_y w:  d_x = r (g - x r^2 mean(g x)),  d_w = sum over rows of d_y x r
// One warp a row; the row's r is kept for d_w.
#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

__device__ float inverse_rms(const float* x, std::int64_t width, float eps) {
  float squares = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) squares += x[c] * x[c];
  return 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
}

__global__ void rms_norm_forward(RmsNorm op) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const float* x = op.x + row * op.width;
  const float r = inverse_rms(x, op.width, op.eps);
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp)
    op.y[row * op.width + c] = x[c] * r * op.w[c];
}

__global__ void rms_norm_backward(RmsNormBackward op, float* inverse) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const float* x = op.x + row * op.width;
  const float* d_y = op.d_y + row * op.width;
  const float r = inverse_rms(x, op.width, op.eps);
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) product += d_y[c] * op.w[c] * x[c];
  const float pull = warp_sum(product) / static_cast<float>(op.width) * r * r;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float gradient = r * (d_y[c] * op.w[c] - x[c] * pull);
    float* out = op.d_x + row * op.width + c;
    *out = op.into_d_x == Accumulate::kAdd ? *out + gradient : gradient;
  }
  if (threadIdx.x % kWarp == 0) inverse[row] = r;
}

struct WeightTerm {
  const float* x;
  const float* d_y;
  const float* inverse;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t at = row * width + column;
    return d_y[at] * x[at] * inverse[row];
  }
};

}  // namespace

void launch(OpCall& call, const RmsNorm& op) {
  call.set_shape({op.rows, op.width});
  call.launch(rms_norm_forward, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op);
}

void launch(OpCall& call, const RmsNormBackward& op) {
  call.set_shape({op.rows, op.width});
  auto* inverse = call.scratch<float>(op.rows);
  call.launch(rms_norm_backward, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op,
              inverse);
  if (op.d_w == nullptr) return;
  add_column_sums(call, WeightTerm{op.x, op.d_y, inverse, op.width}, op.rows, op.width, op.d_w);
}

}  // namespace terrace::trainer::cuda
