// Rows to experts and back, and the balance of their load.
#include <algorithm>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec.hpp"
#include "runtime/assert.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRowGrain = 64;

}  // namespace

// A counting sort, stable in t * top_k + j. A few thousand rows: not worth a second thread.
void compute(const Permute& op, std::byte*) {
  const std::int64_t rows = op.tokens * op.top_k;
  std::fill_n(op.offsets, op.experts + 1, 0);
  for (std::int64_t i = 0; i < rows; ++i) {
    TERRACE_CHECK(op.expert[i] >= 0 && op.expert[i] < op.experts, "every slot names an expert");
    ++op.offsets[op.expert[i] + 1];
  }
  for (std::int64_t e = 0; e < op.experts; ++e) op.offsets[e + 1] += op.offsets[e];
  // offsets[e] serves as the next free row of e and is moved back by one expert at the end.
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int32_t row = op.offsets[op.expert[i]]++;
    op.row[i] = row;
    op.source[row] = static_cast<std::int32_t>(i);
  }
  for (std::int64_t e = op.experts; e > 0; --e) op.offsets[e] = op.offsets[e - 1];
  op.offsets[0] = 0;
}

void compute(const GatherRows& op, std::byte*) {
  parallel_ranges(op.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      std::copy_n(op.x + op.source[r] / op.top_k * op.width, op.width, op.out + r * op.width);
    }
  });
}

void compute(const SumRows& op, std::byte*) {
  parallel_ranges(op.tokens, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      float* out = op.out + t * op.width;
      if (op.into == Accumulate::kOverwrite) std::fill_n(out, op.width, 0.0F);
      for (std::int64_t j = t * op.top_k; j < (t + 1) * op.top_k; ++j) {
        axpy(op.weight == nullptr ? 1.0F : op.weight[j], op.x + op.row[j] * op.width, out, op.width);
      }
    }
  });
}

void compute(const SumRowsBackward& op, std::byte*) {
  parallel_ranges(op.tokens, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* d_out = op.d_out + t * op.width;
      for (std::int64_t j = t * op.top_k; j < (t + 1) * op.top_k; ++j) {
        const std::int64_t at = op.row[j] * op.width;
        const float weight = op.weight == nullptr ? 1.0F : op.weight[j];
        if (op.d_weight != nullptr) op.d_weight[j] = dot(d_out, op.x + at, op.width);
        for (std::int64_t i = 0; i < op.width; i += kLanes) {
          store_part(op.d_x + at + i, load_part(d_out + i, op.width - i) * weight, op.width - i);
        }
      }
    }
  });
}

void compute(const BalanceBias& op, std::byte*) {
  const std::int64_t total = op.offsets[op.experts] - op.offsets[0];
  for (std::int64_t e = 0; e < op.experts; ++e) {
    const std::int64_t count = op.offsets[e + 1] - op.offsets[e];
    const std::int64_t short_of_mean = total - count * op.experts;  // times the number of experts: exact
    op.bias[e] += op.gamma * static_cast<float>((short_of_mean > 0) - (short_of_mean < 0));
  }
}

}  // namespace terrace::trainer::cpu
