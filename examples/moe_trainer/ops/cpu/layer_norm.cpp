// y = n w + b, n = (x - mean) r, r = 1 / sqrt(var + eps). With u = w dy:
// dx = r (u - mean u - n mean(u n)), dw = sum dy n, db = sum dy.
#include <cmath>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/row_parts.hpp"

namespace terrace::trainer::cpu {
namespace {

struct Moments {
  float mean, inverse_deviation;
};

// Two passes: the variance of the centred values, not a difference of squares.
Moments moments(const float* x, std::int64_t width, float eps) {
  Vec total = zero();
  for (std::int64_t i = 0; i < width; i += kLanes) total += load_part(x + i, width - i);
  const float mean = sum(total) / static_cast<float>(width);
  Vec squares = zero();
  std::int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Vec centred = load(x + i) - mean;
    squares += centred * centred;
  }
  float rest = 0;
  for (; i < width; ++i) rest += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0F / std::sqrt((sum(squares) + rest) / static_cast<float>(width) + eps)};
}

}  // namespace

void compute(const LayerNorm& op, std::byte*) {
  parallel_ranges(op.rows, 32, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* x = op.x + row * op.width;
      const Moments m = moments(x, op.width, op.eps);
      for (std::int64_t i = 0; i < op.width; i += kLanes) {
        const std::int64_t n = op.width - i;
        const Vec normal = (load_part(x + i, n) - m.mean) * m.inverse_deviation;
        store_part(op.y + row * op.width + i, normal * load_part(op.w + i, n) + load_part(op.b + i, n), n);
      }
    }
  });
}

Bytes scratch_bytes(const LayerNormBackward& op) { return row_parts_bytes(2 * op.width); }

void compute(const LayerNormBackward& op, std::byte* scratch) {
  const RowSum sums{op.rows, 2 * op.width, reinterpret_cast<float*>(scratch)};
  for_rows(sums, [&](std::int64_t row, float* d_wb) {
    const float* x = op.x + row * op.width;
    const float* d_y = op.d_y + row * op.width;
    float* d_x = op.d_x + row * op.width;
    const Moments m = moments(x, op.width, op.eps);
    Vec total = zero(), along = zero();
    for (std::int64_t i = 0; i < op.width; i += kLanes) {
      const std::int64_t n = op.width - i;
      const Vec normal = (load_part(x + i, n) - m.mean) * m.inverse_deviation, dy = load_part(d_y + i, n);
      const Vec u = dy * load_part(op.w + i, n);
      total += u;
      along += u * normal;
      store_part(d_wb + i, load_part(d_wb + i, n) + dy * normal, n);
      store_part(d_wb + op.width + i, load_part(d_wb + op.width + i, n) + dy, n);
    }
    const float mean_u = sum(total) / static_cast<float>(op.width);
    const float mean_un = sum(along) / static_cast<float>(op.width);
    for (std::int64_t i = 0; i < op.width; i += kLanes) {
      const std::int64_t n = op.width - i;
      const Vec normal = (load_part(x + i, n) - m.mean) * m.inverse_deviation;
      Vec d =
          (load_part(d_y + i, n) * load_part(op.w + i, n) - mean_u - normal * mean_un) * m.inverse_deviation;
      if (op.into_d_x == Accumulate::kAdd) d += load_part(d_x + i, n);
      store_part(d_x + i, d, n);
    }
  });
  add_row_parts(sums, 0, op.width, op.d_w);
  add_row_parts(sums, op.width, op.width, op.d_b);
}

}  // namespace terrace::trainer::cpu
