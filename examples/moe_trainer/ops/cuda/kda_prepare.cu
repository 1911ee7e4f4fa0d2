// q, k: x (sum x^2 + eps)^-1/2 over a head                                           (B, T, H, K)
// g = -exp(A) softplus(z + dt), or lower_bound sigmoid(exp(A) (z + dt))              (B, T, HV, K)
// beta = sigmoid                                                                     (B, T, HV)
#include <cmath>

#include "examples/moe_trainer/ops/cuda/kda.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

// One warp a row.
__global__ void l2_normalise(const float* x, std::int64_t rows, std::int64_t width, float eps, float* y) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= rows) return;
  const float* from = x + row * width;
  float squares = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) squares += from[c] * from[c];
  const float r = 1.0F / sqrtf(warp_sum(squares) + eps);
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) y[row * width + c] = from[c] * r;
}

struct GateArguments {
  std::int64_t count, value_heads, key_width;
  KdaGate gate;
  float lower_bound;
  const float* z;
  const float* a_log;
  const float* dt_bias;
};

__global__ void log_decay(GateArguments a, float* g) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= a.count) return;
  const std::int64_t column = at % (a.value_heads * a.key_width);
  const float rate = expf(a.a_log[column / a.key_width]);
  const float z = a.z[at] + a.dt_bias[column];
  if (a.gate == KdaGate::kSoftplus) {
    g[at] = -rate * (fmaxf(z, 0.0F) + log1pf(expf(-fabsf(z))));
  } else {
    g[at] = a.lower_bound * sigmoid(rate * z);
  }
}

__global__ void sigmoid_of(const float* x, std::int64_t count, float* y) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < count) y[at] = sigmoid(x[at]);
}

}  // namespace

KdaSizes kda_sizes(OpCall& call, const KdaShape& shape) {
  call.set_shape(
      {shape.batch, shape.length, shape.key_heads, shape.value_heads, shape.key_width, shape.value_width});
  call.require(shape.key_width >= 1 && shape.key_width <= kMaxKdaWidth, "key_width must be 1 to 128");
  call.require(shape.value_width >= 1 && shape.value_width <= kMaxKdaWidth, "value_width must be 1 to 128");
  call.require(shape.key_heads >= 1 && shape.value_heads % shape.key_heads == 0,
               "value_heads must be a multiple of key_heads");
  call.require(!shape.packing || shape.batch == 1, "packed sequences lie in one batch row");
  const float scale = shape.scale != 0.0F
                          ? shape.scale
                          : static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.key_width)));
  return {.batch = shape.batch,
          .length = shape.length,
          .key_heads = shape.key_heads,
          .value_heads = shape.value_heads,
          .key_width = shape.key_width,
          .value_width = shape.value_width,
          .scale = scale,
          .sequences = shape.sequences(),
          .starts = shape.packing.starts};
}

KdaPrepared prepare_kda(OpCall& call, const KdaShape& shape, const KdaInputs& in) {
  const std::int64_t tokens = shape.batch * shape.length;
  const std::int64_t key_rows = tokens * shape.key_heads;
  const std::int64_t gates = tokens * shape.value_heads * shape.key_width;
  const std::int64_t betas = tokens * shape.value_heads;
  auto* q = call.scratch<float>(key_rows * shape.key_width);
  auto* k = call.scratch<float>(key_rows * shape.key_width);
  auto* g = call.scratch<float>(gates);
  auto* beta = call.scratch<float>(betas);
  const Grid rows{.x = ceil_div(key_rows, kRowsPerBlock), .threads = kThreads};
  call.launch(l2_normalise, rows, in.q, key_rows, shape.key_width, shape.l2_eps, q);
  call.launch(l2_normalise, rows, in.k, key_rows, shape.key_width, shape.l2_eps, k);
  call.launch(log_decay, grid_for(gates, kThreads),
              GateArguments{.count = gates,
                            .value_heads = shape.value_heads,
                            .key_width = shape.key_width,
                            .gate = shape.gate,
                            .lower_bound = shape.lower_bound,
                            .z = in.gate,
                            .a_log = in.a_log,
                            .dt_bias = in.dt_bias},
              g);
  call.launch(sigmoid_of, grid_for(betas, kThreads), in.beta, betas, beta);
  return {q, k, g, beta};
}

}  // namespace terrace::trainer::cuda
