// C (m, n) = op(A) op(B) [+ C], row-major, by cuBLAS: fp32 in true fp32, bf16 on the matrix units with fp32
// sums. cuBLAS is column-major: a row-major matrix is its own transpose there, so C^T = op(B)^T op(A)^T is
// asked for.
#include "examples/moe_trainer/ops/cuda/operators.hpp"

namespace terrace::trainer::cuda {
namespace {

cudaDataType_t data_type(Dtype dtype) { return dtype == Dtype::kF32 ? CUDA_R_32F : CUDA_R_16BF; }

// Products of bf16 use the matrix units, but never a sum in bf16. The handle is pedantic otherwise.
class Bf16Math {
 public:
  Bf16Math(OpCall& call, Dtype dtype) : handle_(dtype == Dtype::kBf16 ? call.blas() : nullptr) {
    if (handle_ == nullptr) return;
    const auto mode = static_cast<cublasMath_t>(static_cast<unsigned>(CUBLAS_DEFAULT_MATH) |
                                                CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    call.check(cublasSetMathMode(handle_, mode), "cublasSetMathMode");
  }
  Bf16Math(const Bf16Math&) = delete;
  Bf16Math& operator=(const Bf16Math&) = delete;
  ~Bf16Math() {
    if (handle_ != nullptr) cublasSetMathMode(handle_, CUBLAS_PEDANTIC_MATH);
  }

 private:
  cublasHandle_t handle_;
};

}  // namespace

void launch(OpCall& call, const Matmul& op) {
  call.set_shape({op.m, op.n, op.k});
  const Dtype in = op.a.dtype();
  call.require(op.b.dtype() == in && (op.c.dtype() == in || op.c.dtype() == Dtype::kF32),
               "a and b of one type, c of that type or fp32");
  if (op.m <= 0 || op.n <= 0) return;
  if (op.k <= 0) {
    if (op.into == Accumulate::kAdd) return;
    const std::int64_t bytes = op.m * op.n * bytes_of(op.c.dtype());
    call.check(cudaMemsetAsync(op.c.at(), 0, static_cast<std::size_t>(bytes), call.stream()),
               "cudaMemsetAsync");
    return;
  }
  const float one = 1.0F;
  const float beta = op.into == Accumulate::kAdd ? 1.0F : 0.0F;
  const bool a_stored_transposed = op.ta == Transpose::kYes;
  const bool b_stored_transposed = op.tb == Transpose::kYes;
  const Bf16Math math(call, in);
  call.check(cublasGemmEx_64(
                 call.blas(), b_stored_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                 a_stored_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, op.n, op.m, op.k, &one, op.b.at(),
                 data_type(in), b_stored_transposed ? op.k : op.n, op.a.at(), data_type(in),
                 a_stored_transposed ? op.m : op.k, &beta, op.c.at(), data_type(op.c.dtype()), op.n,
                 in == Dtype::kF32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
             "cublasGemmEx");
}

}  // namespace terrace::trainer::cuda
