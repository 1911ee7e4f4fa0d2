// Accumulators of wgmma to shared memory, in bf16, by one warp (stmatrix). Compute capability 9.0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"

namespace terrace::trainer::cuda::hopper {

// Four matrices of 8 rows by 8 bf16. Lane 8 i + r gives the place of row r of matrix i, 16 bytes; register i
// of lane l has row l / 4, columns 2 (l % 4) and the next of matrix i: what wgmma leaves in a lane of its
// warp's 16 rows by 8 columns, upper 8 rows and lower.
__device__ inline void store_matrices(std::byte* row, const std::uint32_t (&matrices)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}

}  // namespace terrace::trainer::cuda::hopper
