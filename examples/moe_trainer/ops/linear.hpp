// Matrix products, dense and grouped by expert. Common rules: ops.hpp.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

enum class Accumulate : std::uint8_t { kOverwrite, kAdd };
enum class Transpose : std::uint8_t { kNo, kYes };

// C (m, n) = op(A) op(B) [+ C]. op(A) is (m, k), op(B) is (k, n); stored transposed where the flag says so.
struct Matmul {
  std::int64_t m, n, k;
  In a;
  Transpose ta;
  In b;
  Transpose tb;
  Out c;
  Accumulate into = Accumulate::kOverwrite;
};

// Rows of expert e are offsets[e] .. offsets[e + 1) of a (rows, k) matrix; offsets live on the device and
// their last is at most `rows`. Rows past the last offset are neither read nor written.
struct GroupedMatmul {  // forward: c_r = w_e a_r ; input gradient: a_r = w_e^T c_r
  std::int64_t groups, rows, n, k;
  const std::int32_t* offsets;  // (groups + 1)
  In a;               // forward: (rows, k); input gradient: (rows, n)
  In w;               // (groups, n, k)
  Out c;                     // forward: (rows, n); input gradient: (rows, k)
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

}  // namespace terrace::trainer
