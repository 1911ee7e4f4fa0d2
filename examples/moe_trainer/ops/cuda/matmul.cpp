// C (m, n) = op(A) op(B) [+ C], row-major, by cuBLAS in true fp32.
// cuBLAS is column-major: a row-major matrix is its own transpose there, so C^T = op(B)^T op(A)^T is asked
// for.
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {

void launch(OpCall& call, const Matmul& op) {
  call.set_shape({op.m, op.n, op.k});
  if (op.m <= 0 || op.n <= 0) return;
  if (op.k <= 0) {
    if (op.into == Accumulate::kOverwrite) call.zero(op.c, op.m * op.n);
    return;
  }
  const float one = 1.0F;
  const float beta = op.into == Accumulate::kAdd ? 1.0F : 0.0F;
  const bool a_stored_transposed = op.ta == Transpose::kYes;
  const bool b_stored_transposed = op.tb == Transpose::kYes;
  call.check(cublasGemmEx_64(call.blas(), b_stored_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                             a_stored_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, op.n, op.m, op.k, &one, op.b,
                             CUDA_R_32F, b_stored_transposed ? op.k : op.n, op.a, CUDA_R_32F,
                             a_stored_transposed ? op.m : op.k, &beta, op.c, CUDA_R_32F, op.n,
                             CUBLAS_COMPUTE_32F_PEDANTIC, CUBLAS_GEMM_DEFAULT),
             "cublasGemmEx");
}

}  // namespace terrace::trainer::cuda
