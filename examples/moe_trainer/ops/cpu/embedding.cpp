#include <algorithm>

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

}  // namespace terrace::trainer::cpu
