// Matrix products, dense and grouped by expert. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

enum class Accumulate : std::uint8_t { kOverwrite, kAdd };
enum class Transpose : std::uint8_t { kNo, kYes };

// C (m, n) = op(A) op(B) [+ C]. op(A) is (m, k), op(B) is (k, n); stored transposed where the flag says so.
// a and b are of one type. C is of that type, or fp32 beside bf16 a and b: the gradient of a weight.
struct Matmul {
  std::int64_t m, n, k;
  In a;
  Transpose ta;
  In b;
  Transpose tb;
  Out c;
  Accumulate into = Accumulate::kOverwrite;
};
template <typename F>
void visit_arrays(Matmul& op, F&& visit) {
  visit(op.a, op.m * op.k);
  visit(op.b, op.k * op.n);
  visit(op.c, op.m * op.n, op.into);
}

// Rows of expert e are offsets[e] .. offsets[e + 1) of a (rows, k) matrix; offsets ascend, live on the
// device, and their last is at most `rows`. Rows past the last offset are neither used nor written: they may
// hold anything, NaN included.
struct GroupedMatmul {  // forward: c_r = w_e a_r ; input gradient: a_r = w_e^T c_r
  std::int64_t groups, rows, n, k;
  const std::int32_t* offsets;  // (groups + 1)
  In a;                         // forward: (rows, k); input gradient: (rows, n)
  In w;                         // (groups, n, k)
  Out c;                        // forward: (rows, n); input gradient: (rows, k)
  Accumulate into = Accumulate::kOverwrite;
};
struct GroupedWeightGradient {  // d_w_e (n, k) [+]= sum over rows r of e: d_c_r a_r^T ; zero for an empty
                                // expert
  std::int64_t groups, rows, n, k;
  const std::int32_t* offsets;
  In d_c;  // (rows, n)
  In a;    // (rows, k)
  float* d_w;
  Accumulate into = Accumulate::kOverwrite;
};
template <typename F>
void visit_arrays(GroupedWeightGradient& op, F&& visit) {
  visit(op.d_c, op.rows * op.n);
  visit(op.a, op.rows * op.k);
}

}  // namespace terrace::trainer
