// Embedding, sums and conversions of arrays.
#include <algorithm>
#include <cmath>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec.hpp"
#include "runtime/assert.hpp"

namespace terrace::trainer::cpu {
namespace {

std::int64_t checked(std::int32_t id, std::int64_t vocabulary) {
  TERRACE_CHECK(id >= 0 && id < vocabulary, "token ids lie inside the vocabulary");
  return id;
}

constexpr std::int64_t kGrain = 16384;

}  // namespace

void compute(const Embedding& op, std::byte*) {
  parallel_ranges(op.tokens, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      std::copy_n(op.table + checked(op.ids[t], op.vocabulary) * op.width, op.width, op.out + t * op.width);
    }
  });
}

// A task owns columns of the table and adds all tokens to them in order.
void compute(const EmbeddingBackward& op, std::byte*) {
  const std::int64_t grain = std::max<std::int64_t>(16, round_up_to((op.width + 7) / 8, 16));
  parallel_ranges(op.width, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < op.tokens; ++t) {
      axpy(1.0F, op.d_out + t * op.width + begin,
           op.d_table + checked(op.ids[t], op.vocabulary) * op.width + begin, end - begin);
    }
  });
}

void compute(const Add& op, std::byte*) {
  const float *a = op.a, *b = op.b;
  parallel_ranges(op.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kLanes) {
      const std::int64_t n = end - i;
      Vec sum = zero();
      if (op.a_factor != 0) sum += load_part(a + i, n) * op.a_factor;
      if (op.b_factor != 0) sum += load_part(b + i, n) * op.b_factor;
      store_part(op.out + i, sum, n);
    }
  });
}

void compute(const RandomFill& op, std::byte*) {
  parallel_ranges(op.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    float* y = op.y;
    for (std::int64_t i = begin; i < end; ++i) y[i] = op.number(i);
  });
}

void compute(const Convert& op, std::byte*) {
  float factor = op.factor;
  if (op.sum_of_squares != nullptr) factor /= std::sqrt(*op.sum_of_squares) + kRootGuard;
  parallel_ranges(op.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kLanes) {
      store_part(op.y + i, load_part(op.x + i, end - i) * factor, end - i);
    }
  });
}

}  // namespace terrace::trainer::cpu
