// y = n w + b,  n = (x - mean) r,  r = (var + eps)^-1/2       x, y: (rows, width)   w, b: (width)
// g = d_y w:  d_x = r (g - mean(g) - n mean(g n)),  d_w = sum over rows of d_y n,  d_b = sum over rows of d_y
// One warp a row; the variance is taken around the mean in a second pass.
#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

struct Moments {
  float mean;
  float inverse;  // of the standard deviation
};
__device__ Moments moments_of(const float* x, std::int64_t width, float eps) {
  float sum = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) sum += x[c];
  const float mean = warp_sum(sum) / static_cast<float>(width);
  float squares = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) squares += (x[c] - mean) * (x[c] - mean);
  return {mean, 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps)};
}

__global__ void layer_norm_forward(LayerNorm op) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const float* x = op.x + row * op.width;
  const Moments m = moments_of(x, op.width, op.eps);
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    op.y[row * op.width + c] = (x[c] - m.mean) * m.inverse * op.w[c] + op.b[c];
  }
}

__global__ void layer_norm_backward(LayerNormBackward op, Moments* moments) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const float* x = op.x + row * op.width;
  const float* d_y = op.d_y + row * op.width;
  const Moments m = moments_of(x, op.width, op.eps);
  float sum = 0.0F;
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float g = d_y[c] * op.w[c];
    sum += g;
    product += g * (x[c] - m.mean) * m.inverse;
  }
  const float mean_g = warp_sum(sum) / static_cast<float>(op.width);
  const float mean_gn = warp_sum(product) / static_cast<float>(op.width);
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float n = (x[c] - m.mean) * m.inverse;
    const float gradient = m.inverse * (d_y[c] * op.w[c] - mean_g - n * mean_gn);
    float* out = op.d_x + row * op.width + c;
    *out = op.into_d_x == Accumulate::kAdd ? *out + gradient : gradient;
  }
  if (threadIdx.x % kWarp == 0) moments[row] = m;
}

struct WeightTerm {
  const float* x;
  const float* d_y;
  const Moments* moments;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t at = row * width + column;
    return d_y[at] * (x[at] - moments[row].mean) * moments[row].inverse;
  }
};
struct BiasTerm {
  const float* d_y;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    return d_y[row * width + column];
  }
};

}  // namespace

void launch(OpCall& call, const LayerNorm& op) {
  call.set_shape({op.rows, op.width});
  call.launch(layer_norm_forward, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op);
}

void launch(OpCall& call, const LayerNormBackward& op) {
  call.set_shape({op.rows, op.width});
  auto* moments = call.scratch<Moments>(op.rows);
  call.launch(layer_norm_backward, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op,
              moments);
  if (op.d_w != nullptr) {
    add_column_sums(call, WeightTerm{op.x, op.d_y, moments, op.width}, op.rows, op.width, op.d_w);
  }
  if (op.d_b != nullptr) add_column_sums(call, BiasTerm{op.d_y, op.width}, op.rows, op.width, op.d_b);
}

}  // namespace terrace::trainer::cuda
