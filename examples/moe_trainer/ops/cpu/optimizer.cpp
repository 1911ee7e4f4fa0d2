// AdamW with decoupled decay and clipping by the global norm; the sum of squares that the norm comes from.
#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kGrain = 32768;

std::int64_t parts_of(std::int64_t count) { return (count + kGrain - 1) / kGrain; }

Vec square_root(Vec x) {
  Vec root;
  for (int i = 0; i < kLanes; ++i) root[i] = std::sqrt(x[i]);
  return root;
}

}  // namespace

Bytes scratch_bytes(const SumOfSquares& op) {
  return Bytes(static_cast<std::uint64_t>(parts_of(op.count)) * sizeof(double));
}

void compute(const SumOfSquares& op, std::byte* scratch) {
  auto* parts = reinterpret_cast<double*>(scratch);
  parallel_ranges(op.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    parts[begin / kGrain] = static_cast<double>(dot(op.x + begin, op.x + begin, end - begin));
  });
  double total = 0;
  for (std::int64_t part = 0; part < parts_of(op.count); ++part) total += parts[part];
  *op.out += static_cast<float>(total);
}

void compute(const AdamW& op, std::byte*) {
  float clip = 1.0F;
  if (op.clip_norm > 0 && op.sum_of_squares != nullptr) {
    const float norm = std::sqrt(*op.sum_of_squares);
    // Written so that a NaN norm reaches the parameters instead of passing as "below the limit".
    if (!(norm <= op.clip_norm)) clip = op.clip_norm / norm;
  }
  const double step = static_cast<double>(op.step);
  const auto first = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(op.beta1), step)));
  const auto second = static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(op.beta2), step)));
  const float keep = 1.0F - op.learning_rate * op.weight_decay;
  parallel_ranges(op.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kLanes) {
      const std::int64_t n = end - i;
      const Vec g = load_part(op.gradient + i, n) * clip;
      const Vec m = load_part(op.m + i, n) * op.beta1 + g * (1.0F - op.beta1);
      const Vec v = load_part(op.v + i, n) * op.beta2 + g * g * (1.0F - op.beta2);
      const Vec update = m * first / (square_root(v * second) + op.eps);
      store_part(op.m + i, m, n);
      store_part(op.v + i, v, n);
      const Vec parameter = load_part(op.parameter + i, n) * keep - op.learning_rate * update;
      store_part(op.parameter + i, parameter, n);
      if (op.compute_copy) store_part(op.compute_copy + i, parameter, n);
    }
  });
}

}  // namespace terrace::trainer::cpu
