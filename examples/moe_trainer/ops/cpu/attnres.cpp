// logit_l = r_l <w q, v_l>, r_l = 1 / sqrt(mean v_l^2 + eps), p = softmax(logit), h = sum p_l v_l. Backward,
// with g_l = <v_l, dh>: ds_l = p_l (g_l - sum p g); dv_l = p_l dh + ds_l r_l (w q - v_l r_l logit_l / width);
// d(w q) = sum ds_l r_l v_l, and from it dq = d(w q) w, dw = d(w q) q.
#include <array>
#include <cmath>
#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/row_parts.hpp"

namespace terrace::trainer::cpu {
namespace {

using PerSource = std::array<float, kMaxAttnResSources>;

struct Mix {
  PerSource logit, inverse_rms, probability;
};

void product_of(const float* w, const float* q, float* out, std::int64_t width) {
  for (std::int64_t i = 0; i < width; ++i) out[i] = w[i] * q[i];
}

template <typename Op>
Mix mix_of(const Op& op, const float* wq, std::int64_t row) {
  Mix mix{};
  const auto sources = static_cast<std::size_t>(op.sources);
  float top = -INFINITY;
  for (std::size_t l = 0; l < sources; ++l) {
    const float* v = op.v[l] + row * op.width;
    mix.inverse_rms[l] = 1.0F / std::sqrt(dot(v, v, op.width) / static_cast<float>(op.width) + op.eps);
    mix.logit[l] = mix.inverse_rms[l] * dot(v, wq, op.width);
    top = std::max(top, mix.logit[l]);
  }
  float total = 0;
  for (std::size_t l = 0; l < sources; ++l) total += mix.probability[l] = std::exp(mix.logit[l] - top);
  for (std::size_t l = 0; l < sources; ++l) mix.probability[l] /= total;
  return mix;
}

// The row's dv, and its part of d(w q).
void row_backward(const AttnResBackward& op, const float* wq, std::int64_t row, float* d_wq) {
  const Mix mix = mix_of(op, wq, row);
  const float* d_h = op.d_h + row * op.width;
  const auto sources = static_cast<std::size_t>(op.sources);
  PerSource g{};
  float mean = 0;
  for (std::size_t l = 0; l < sources; ++l) {
    g[l] = dot(op.v[l] + row * op.width, d_h, op.width);
    mean += mix.probability[l] * g[l];
  }
  for (std::size_t l = 0; l < sources; ++l) {
    const float* v = op.v[l] + row * op.width;
    const float p = mix.probability[l];
    const float along_wq = p * (g[l] - mean) * mix.inverse_rms[l];
    const float along_v = -along_wq * mix.inverse_rms[l] * mix.logit[l] / static_cast<float>(op.width);
    axpy(along_wq, v, d_wq, op.width);
    if (!op.d_v[l]) continue;
    float* d_v = op.d_v[l] + row * op.width;
    for (std::int64_t i = 0; i < op.width; i += kLanes) {
      const std::int64_t n = op.width - i;
      Vec d = load_part(d_h + i, n) * p + load_part(wq + i, n) * along_wq + load_part(v + i, n) * along_v;
      if (op.into_d_v[l] == Accumulate::kAdd) d += load_part(d_v + i, n);
      store_part(d_v + i, d, n);
    }
  }
}

template <typename Op>
void check_sources(const Op& op) {
  if (op.sources < 1 || op.sources > kMaxAttnResSources) {
    throw std::runtime_error("attention residuals: sources must be 1 to 16");
  }
}

std::int64_t padded(std::int64_t width) { return round_up_to(width, 16); }

}  // namespace

// Called when the operator is enqueued, so a bad shape is reported to the caller.
Bytes scratch_bytes(const AttnRes& op) {
  check_sources(op);
  return Bytes(static_cast<std::uint64_t>(padded(op.width)) * sizeof(float));
}
Bytes scratch_bytes(const AttnResBackward& op) {
  check_sources(op);
  return Bytes(static_cast<std::uint64_t>(padded(op.width)) * sizeof(float)) + row_parts_bytes(op.width);
}

void compute(const AttnRes& op, std::byte* scratch) {
  auto* wq = reinterpret_cast<float*>(scratch);
  product_of(op.w, op.q, wq, op.width);
  parallel_ranges(op.rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const Mix mix = mix_of(op, wq, row);
      float* h = op.h + row * op.width;
      std::fill_n(h, op.width, 0.0F);
      for (std::size_t l = 0; l < static_cast<std::size_t>(op.sources); ++l) {
        axpy(mix.probability[l], op.v[l] + row * op.width, h, op.width);
        if (op.probability != nullptr) {
          op.probability[row * op.sources + static_cast<std::int64_t>(l)] = mix.probability[l];
        }
      }
    }
  });
}

void compute(const AttnResBackward& op, std::byte* scratch) {
  auto* wq = reinterpret_cast<float*>(scratch);
  product_of(op.w, op.q, wq, op.width);
  float* accumulators = wq + padded(op.width);
  const RowSum sums{op.rows, op.width, accumulators};
  for_rows(sums, [&](std::int64_t row, float* d_wq) { row_backward(op, wq, row, d_wq); });
  float* total = accumulators;  // the first part's accumulator becomes the sum of all
  for (std::int64_t part = 1; part < kRowParts; ++part) {
    axpy(1.0F, accumulators + part * op.width, total, op.width);
  }
  for (std::int64_t i = 0; i < op.width; ++i) {
    if (op.d_q != nullptr) op.d_q[i] += total[i] * op.w[i];
    if (op.d_w != nullptr) op.d_w[i] += total[i] * op.q[i];
  }
}

}  // namespace terrace::trainer::cpu
