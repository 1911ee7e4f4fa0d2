// AdamW: g' = g min(1, clip / |g|_all);  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2;
//        p -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)
// 28 bytes a number in fp32, two more for a bf16 copy: one pass, four numbers a thread.
#include <cmath>

#include "examples/moe_trainer/ops/cuda/fours.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

struct Corrections {
  float first;   // 1 / (1 - beta1^step)
  float second;  // 1 / (1 - beta2^step)
};

struct Step {
  float m, v, parameter;
};
__device__ Step adam_step(const AdamW& op, const Corrections& corrections, Step now, float gradient) {
  now.m = op.beta1 * now.m + (1.0F - op.beta1) * gradient;
  now.v = op.beta2 * now.v + (1.0F - op.beta2) * gradient * gradient;
  const float step = now.m * corrections.first / (sqrtf(now.v * corrections.second) + op.eps);
  now.parameter -= op.learning_rate * (step + op.weight_decay * now.parameter);
  return now;
}

__global__ void adamw(AdamW op, Corrections corrections, Fours fours) {
  const std::int64_t i = fours.first();
  if (i >= op.count) return;
  float scale = 1.0F;
  if (op.clip_norm > 0.0F && op.sum_of_squares != nullptr) {
    const float ratio = op.clip_norm / sqrtf(*op.sum_of_squares);
    if (!(ratio >= 1.0F)) scale = ratio;  // a NaN passes on and is seen
  }
  const float4 g = fours.load(op.gradient, i), p = fours.load(op.parameter, i);
  const float4 m = fours.load(op.m, i), v = fours.load(op.v, i);
  const Step x = adam_step(op, corrections, {m.x, v.x, p.x}, g.x * scale);
  const Step y = adam_step(op, corrections, {m.y, v.y, p.y}, g.y * scale);
  const Step z = adam_step(op, corrections, {m.z, v.z, p.z}, g.z * scale);
  const Step w = adam_step(op, corrections, {m.w, v.w, p.w}, g.w * scale);
  fours.store(op.m, i, {x.m, y.m, z.m, w.m});
  fours.store(op.v, i, {x.v, y.v, z.v, w.v});
  const float4 parameter{x.parameter, y.parameter, z.parameter, w.parameter};
  fours.store(op.parameter, i, parameter);
  if (op.compute_copy.at() != nullptr) fours.store(op.compute_copy, i, parameter);
}

}  // namespace

void launch(OpCall& call, const AdamW& op) {
  call.set_shape({op.count, op.step});
  const auto correction = [&](float beta) {
    return static_cast<float>(1.0 /
                              (1.0 - std::pow(static_cast<double>(beta), static_cast<double>(op.step))));
  };
  const Fours fours =
      fours_of(op.count, In(op.parameter), op.gradient, In(op.m), In(op.v), In(op.compute_copy));
  call.launch(adamw, grid_of_fours(op.count), op, Corrections{correction(op.beta1), correction(op.beta2)},
              fours);
}

}  // namespace terrace::trainer::cuda
