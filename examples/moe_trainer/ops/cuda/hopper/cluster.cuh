// Blocks of one cluster: their barriers, and bulk loads that reach several of them. Compute capability 9.0.
//
// Blocks of a cluster run at the same time, and each place in shared memory has the same address in all of
// them. A load to several blocks puts its box at that address in each, and completes on the barrier at that
// address in each. So a ring shared by a cluster has in every block a "full" that waits for the bytes of all
// loads that reach the block, whoever asked for them, and an "empty" that counts the arrivals of the users
// of every block that this block's loads reach. A block must not end before the last arrival from another.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tma.cuh"

namespace terrace::trainer::cuda::hopper {

// This block's number in its cluster.
[[nodiscard]] __device__ inline std::uint32_t block_in_cluster() {
  std::uint32_t rank = 0;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of all blocks of the cluster that have not ended. Threads of one warp need not
// come together.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// One arrival on the same barrier of another block, or of this one.
__device__ inline void arrive_in_block(const Barrier* barrier, std::uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(&barrier->state)),
      "r"(block)
      : "memory");
}

// Bit b of `blocks`: the box goes to block b.
__device__ inline void load_box_into(std::uint16_t blocks, void* shared, const CUtensorMap* map,
                                     Barrier* full, At2 at, Keep keep = Keep::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3, %6;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(&full->state)), "h"(blocks), "r"(at.x),
      "r"(at.y), "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}
__device__ inline void load_box_into(std::uint16_t blocks, void* shared, const CUtensorMap* map,
                                     Barrier* full, At3 at, Keep keep = Keep::kNormal) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3, %7;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)), "r"(shared_address(&full->state)), "h"(blocks), "r"(at.x),
      "r"(at.y), "r"(at.z), "l"(static_cast<std::uint64_t>(keep))
      : "memory");
}

}  // namespace terrace::trainer::cuda::hopper
