// Embedding, sums and conversions of arrays. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// out = a_factor a + b_factor b. Each array has a type of its own; out may be a or b. One whose factor is
// zero counts as zeros and is not read.
struct Add {
  std::int64_t count;
  In a = nullptr;
  In b = nullptr;
  Out out;
  float a_factor = 1.0F, b_factor = 1.0F;
};
template <typename F>
void visit_arrays(Add& op, F&& visit) {
  visit(op.a, op.count);
  visit(op.b, op.count);
  visit(op.out, op.count);
}
// y = factor x, of any type into any type; divided by sqrt(*sum_of_squares) + 1e-7 where one is given. y may
// be x where the types are the same.
struct Convert {
  std::int64_t count;
  In x;
  Out y;
  float factor = 1.0F;
  const float* sum_of_squares = nullptr;
};
template <typename F>
void visit_arrays(Convert& op, F&& visit) {
  visit(op.x, op.count);
  visit(op.y, op.count);
}
inline constexpr float kRootGuard = 1e-7F;  // keeps a matrix of zeros zero

struct Embedding {
  std::int64_t tokens, width, vocabulary;
  const std::int32_t* ids;
  In table;  // (vocabulary, width)
  Out out;   // (tokens, width)
};
template <typename F>
void visit_arrays(Embedding& op, F&& visit) {
  visit(op.table, op.vocabulary * op.width);
  visit(op.out, op.tokens * op.width);
}
struct EmbeddingBackward {
  std::int64_t tokens, width, vocabulary;
  const std::int32_t* ids;
  In d_out;
  float* d_table;  // adds
};
template <typename F>
void visit_arrays(EmbeddingBackward& op, F&& visit) {
  visit(op.d_out, op.tokens * op.width);
}

}  // namespace terrace::trainer
