// y = o r w s,  r = (mean o^2 + eps)^-1/2,  s = sigmoid(gate)      o, gate, y: (rows, width)   w: (width)
// g = d_y w s:  d_o = r (g - o r^2 mean(g o)),  d_gate = d_y o r w s (1 - s),  d_w = sum over rows of d_y o r
// s One warp a row: a row is one head of one token.
#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

__device__ float inverse_rms(const float* o, std::int64_t width, float eps) {
  float squares = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) squares += o[c] * o[c];
  return 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
}

__global__ void gated_rms_norm_forward(GatedRmsNorm op) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const std::int64_t base = row * op.width;
  const float r = inverse_rms(op.o + base, op.width, op.eps);
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    op.y[base + c] = op.o[base + c] * r * op.w[c] * sigmoid(op.gate[base + c]);
  }
}

__global__ void gated_rms_norm_backward(GatedRmsNormBackward op, float* inverse) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const std::int64_t base = row * op.width;
  const float r = inverse_rms(op.o + base, op.width, op.eps);
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    product += op.d_y[base + c] * op.w[c] * sigmoid(op.gate[base + c]) * op.o[base + c];
  }
  const float pull = warp_sum(product) / static_cast<float>(op.width) * r * r;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float o = op.o[base + c];
    const float s = sigmoid(op.gate[base + c]);
    const float weighted = op.d_y[base + c] * op.w[c];
    op.d_o[base + c] = r * (weighted * s - o * pull);
    op.d_gate[base + c] = weighted * o * r * s * (1.0F - s);
  }
  if (threadIdx.x % kWarp == 0) inverse[row] = r;
}

struct WeightTerm {
  const float* o;
  const float* gate;
  const float* d_y;
  const float* inverse;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t at = row * width + column;
    return d_y[at] * o[at] * inverse[row] * sigmoid(gate[at]);
  }
};

}  // namespace

void launch(OpCall& call, const GatedRmsNorm& op) {
  call.set_shape({op.rows, op.width});
  call.launch(gated_rms_norm_forward, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op);
}

void launch(OpCall& call, const GatedRmsNormBackward& op) {
  call.set_shape({op.rows, op.width});
  auto* inverse = call.scratch<float>(op.rows);
  call.launch(gated_rms_norm_backward, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op,
              inverse);
  if (op.d_w == nullptr) return;
  add_column_sums(call, WeightTerm{op.o, op.gate, op.d_y, inverse, op.width}, op.rows, op.width, op.d_w);
}

}  // namespace terrace::trainer::cuda
