// out = a + b
// SiTU-GLU: y = 4 tanh(g / 4) sigmoid(g) * 25 tanh(u / 25)
// AdamW: g' = g min(1, clip / |g|_all);  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2;
//        p -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)
// Balance: bias_e += gamma sign(mean count - count_e), compared in whole numbers.
// One thread an element.
#include <cmath>

#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr float kGateRange = 4.0F;
constexpr float kUpRange = 25.0F;

__device__ std::int64_t element() { return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

__global__ void add(Add op) {
  const std::int64_t i = element();
  if (i < op.count) op.out[i] = op.a[i] + op.b[i];
}

__global__ void situ_glu(SituGlu op) {
  const std::int64_t i = element();
  if (i >= op.count) return;
  const float gate = kGateRange * tanhf(op.g[i] / kGateRange) * sigmoid(op.g[i]);
  op.y[i] = gate * kUpRange * tanhf(op.u[i] / kUpRange);
}

__global__ void situ_glu_backward(SituGluBackward op) {
  const std::int64_t i = element();
  if (i >= op.count) return;
  const float a = tanhf(op.g[i] / kGateRange);
  const float s = sigmoid(op.g[i]);
  const float b = tanhf(op.u[i] / kUpRange);
  const float d_y = op.d_y[i];
  op.d_g[i] = d_y * kUpRange * b * s * ((1.0F - a * a) + kGateRange * a * (1.0F - s));
  op.d_u[i] = d_y * kGateRange * a * s * (1.0F - b * b);
  if (op.y != nullptr) op.y[i] = kGateRange * a * s * kUpRange * b;
}

struct AdamWFactors {
  float first_correction;   // 1 / (1 - beta1^step)
  float second_correction;  // 1 / (1 - beta2^step)
};

__global__ void adamw(AdamW op, AdamWFactors factors) {
  const std::int64_t i = element();
  if (i >= op.count) return;
  float scale = 1.0F;
  if (op.clip_norm > 0.0F && op.sum_of_squares != nullptr) {
    const float ratio = op.clip_norm / sqrtf(*op.sum_of_squares);
    if (!(ratio >= 1.0F)) scale = ratio;  // a NaN passes on and is seen
  }
  const float gradient = op.gradient[i] * scale;
  const float m = op.beta1 * op.m[i] + (1.0F - op.beta1) * gradient;
  const float v = op.beta2 * op.v[i] + (1.0F - op.beta2) * gradient * gradient;
  const float p = op.parameter[i];
  const float step = m * factors.first_correction / (sqrtf(v * factors.second_correction) + op.eps);
  op.m[i] = m;
  op.v[i] = v;
  op.parameter[i] = p - op.learning_rate * (step + op.weight_decay * p);
}

__global__ void balance_bias(BalanceBias op) {
  const std::int64_t e = element();
  if (e >= op.experts) return;
  const std::int64_t total = op.offsets[op.experts];
  const std::int64_t own = (std::int64_t{op.offsets[e + 1]} - op.offsets[e]) * op.experts;
  if (total > own) op.bias[e] += op.gamma;
  if (total < own) op.bias[e] -= op.gamma;
}

}  // namespace

void launch(OpCall& call, const Add& op) {
  call.set_shape({op.count});
  call.launch(add, grid_for(op.count), op);
}

void launch(OpCall& call, const SituGlu& op) {
  call.set_shape({op.count});
  call.launch(situ_glu, grid_for(op.count), op);
}

void launch(OpCall& call, const SituGluBackward& op) {
  call.set_shape({op.count});
  call.launch(situ_glu_backward, grid_for(op.count), op);
}

void launch(OpCall& call, const AdamW& op) {
  call.set_shape({op.count, op.step});
  const auto correction = [&](float beta) {
    return static_cast<float>(1.0 /
                              (1.0 - std::pow(static_cast<double>(beta), static_cast<double>(op.step))));
  };
  call.launch(adamw, grid_for(op.count), op, AdamWFactors{correction(op.beta1), correction(op.beta2)});
}

void launch(OpCall& call, const BalanceBias& op) {
  call.set_shape({op.experts});
  call.launch(balance_bias, grid_for(op.experts), op);
}

}  // namespace terrace::trainer::cuda
