// fp32 matrix products by OpenBLAS, each thread with a part of C that the shape alone decides.
#pragma once

#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::trainer::cpu {

// C (m, n) = alpha op(A) op(B) + beta C on the calling thread. Leading dimensions are of the stored matrices.
struct Gemm {
  std::int64_t m, n, k;
  const float* a;
  std::int64_t lda;
  Transpose ta;
  const float* b;
  std::int64_t ldb;
  Transpose tb;
  float* c;
  std::int64_t ldc;
  Accumulate into = Accumulate::kOverwrite;
};
void gemm_here(const Gemm& gemm);  // on the calling thread
void gemm_parallel(const Gemm& gemm);

// Best of a few timed (rows, width, width) products.
[[nodiscard]] double measure_gemm_flops_per_second(std::int64_t rows, std::int64_t width);

}  // namespace terrace::trainer::cpu
