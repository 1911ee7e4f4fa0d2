// y = x r w, r = 1 / sqrt(mean x^2 + eps). With u = w dy: dx = r u - x r^3 <u, x> / width, dw = sum dy x r.
// Gated: y = x r w sigmoid(gate); the same with u = w sigmoid(gate) dy.
#include <cmath>
#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/row_parts.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRowGrain = 32;

float inverse_rms(const float* x, std::int64_t width, float eps) {
  return 1.0F / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
}

// Eight columns of a row at a time; the last group may be short.
template <typename Body>
void for_columns(std::int64_t width, Body&& body) {
  for (std::int64_t i = 0; i < width; i += kLanes) body(i, width - i);
}

}  // namespace

// Called when the operator is enqueued, so a missing array is reported to the caller.
Bytes scratch_bytes(const RmsNorm& op) {
  if (static_cast<bool>(op.residual) != static_cast<bool>(op.sum)) {
    throw std::runtime_error("rms norm: a residual and its sum come together");
  }
  return {};
}

void compute(const RmsNorm& op, std::byte*) {
  parallel_ranges(op.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* x = op.x + row * op.width;
      float* y = op.y + row * op.width;
      if (op.residual) {
        const float* residual = op.residual + row * op.width;
        float* sum = op.sum + row * op.width;
        for_columns(op.width, [&](std::int64_t i, std::int64_t n) {
          store_part(sum + i, load_part(x + i, n) + load_part(residual + i, n), n);
        });
        x = sum;
      }
      const float r = inverse_rms(x, op.width, op.eps);
      for_columns(op.width, [&](std::int64_t i, std::int64_t n) {
        store_part(y + i, load_part(x + i, n) * r * load_part(op.w + i, n), n);
      });
    }
  });
}

Bytes scratch_bytes(const RmsNormBackward& op) { return row_parts_bytes(op.width); }

void compute(const RmsNormBackward& op, std::byte* scratch) {
  const RowSum sums{op.rows, op.width, reinterpret_cast<float*>(scratch)};
  for_rows(sums, [&](std::int64_t row, float* d_w) {
    const float* x = op.x + row * op.width;
    const float* d_y = op.d_y + row * op.width;
    float* d_x = op.d_x + row * op.width;
    const float r = inverse_rms(x, op.width, op.eps);
    Vec inner = zero();
    for_columns(op.width, [&](std::int64_t i, std::int64_t n) {
      const Vec xr = load_part(x + i, n) * r, dy = load_part(d_y + i, n);
      inner += dy * load_part(op.w + i, n) * xr;
      store_part(d_w + i, load_part(d_w + i, n) + dy * xr, n);
    });
    const float along = sum(inner) / static_cast<float>(op.width) * r;
    for_columns(op.width, [&](std::int64_t i, std::int64_t n) {
      Vec d = load_part(d_y + i, n) * load_part(op.w + i, n) * r - load_part(x + i, n) * r * along;
      if (op.d_sum) d += load_part(op.d_sum + row * op.width + i, n);
      if (op.into_d_x == Accumulate::kAdd) d += load_part(d_x + i, n);
      store_part(d_x + i, d, n);
    });
  });
  add_row_parts(sums, 0, op.width, op.d_w);
}

void compute(const GatedRmsNorm& op, std::byte*) {
  parallel_ranges(op.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t at = row * op.width;
      const float r = inverse_rms(op.o + at, op.width, op.eps);
      for_columns(op.width, [&](std::int64_t i, std::int64_t n) {
        const Vec gate = sigmoid(load_part(op.gate + at + i, n));
        store_part(op.y + at + i, load_part(op.o + at + i, n) * r * load_part(op.w + i, n) * gate, n);
      });
    }
  });
}

Bytes scratch_bytes(const GatedRmsNormBackward& op) { return row_parts_bytes(op.width); }

void compute(const GatedRmsNormBackward& op, std::byte* scratch) {
  const RowSum sums{op.rows, op.width, reinterpret_cast<float*>(scratch)};
  for_rows(sums, [&](std::int64_t row, float* d_w) {
    const std::int64_t at = row * op.width;
    const float r = inverse_rms(op.o + at, op.width, op.eps);
    Vec inner = zero();
    for_columns(op.width, [&](std::int64_t i, std::int64_t n) {
      const Vec gate = sigmoid(load_part(op.gate + at + i, n)), w = load_part(op.w + i, n);
      const Vec xr = load_part(op.o + at + i, n) * r, dy = load_part(op.d_y + at + i, n);
      const Vec gated = dy * gate;
      inner += gated * w * xr;
      store_part(d_w + i, load_part(d_w + i, n) + gated * xr, n);
      store_part(op.d_gate + at + i, gated * w * xr * (1.0F - gate), n);
      store_part(op.d_o + at + i, gated * w, n);  // u, finished below
    });
    const float along = sum(inner) / static_cast<float>(op.width) * r;
    for_columns(op.width, [&](std::int64_t i, std::int64_t n) {
      float* d_o = op.d_o + at + i;
      store_part(d_o, load_part(d_o, n) * r - load_part(op.o + at + i, n) * r * along, n);
    });
  });
  add_row_parts(sums, 0, op.width, op.d_w);
}

}  // namespace terrace::trainer::cpu
