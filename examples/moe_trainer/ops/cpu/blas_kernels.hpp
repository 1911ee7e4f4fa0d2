// OpenBLAS picks its kernels by a list of processors. One that is newer than the library falls through to the
// kernels for SSE3: a fifth of the speed. This has it choose again, by what the processor can do.
#pragma once

namespace terrace::trainer::cpu {

// Once, before the first product. Leaves alone a choice that already uses AVX, and one made by the user
// (OPENBLAS_CORETYPE).
void choose_blas_kernels();
// The family whose kernels are in use ("SkylakeX", "Haswell", ...).
[[nodiscard]] const char* blas_kernels_in_use();

}  // namespace terrace::trainer::cpu
