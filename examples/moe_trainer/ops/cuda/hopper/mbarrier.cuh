// Barriers in shared memory that count arrivals and bytes (mbarrier), named barriers of some warps, and the
// register budget of a warpgroup. Compute capability 9.0.
//
// A barrier of count c completes a phase after c arrivals and after all bytes announced with expect_bytes
// have come. Phases alternate parity 0, 1, 0 ... wait(parity) returns once the phase of that parity is
// complete: on a fresh barrier wait(1) returns at once, wait(0) after the first phase. So, of a ring of
// stages used round by round, r = 0, 1 ...: the filler waits for "empty" with parity (r & 1) ^ 1, the user
// for "full" with r & 1.
//
// TERRACE_SM90A is 1 where the code being compiled may use what only sm_90a has (wgmma, setmaxnreg). A kernel
// that needs it puts its whole body behind #if TERRACE_SM90A: the source may be compiled for sm_90 beside it.
//
// TERRACE_RACECHECK (the CMake option) is 1 in a build for compute-sanitizer's racecheck. That sees what a
// thread's own arrival orders, but neither __syncwarp, of which nothing is executed where a warp has not
// diverged, nor all that bar.arrive orders: there each lane arrives for itself, and whoever arrives at a
// named barrier waits.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TERRACE_SM90A 1
#else
#define TERRACE_SM90A 0
#endif

namespace terrace::trainer::cuda::hopper {

#if !defined(TERRACE_RACECHECK)
#define TERRACE_RACECHECK 0
#endif

inline constexpr int kWarpgroup = 128;  // threads

// What the instructions below take for a pointer into shared memory.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

struct Barrier {
  std::uint64_t state;  // in shared memory, 8-byte aligned

  // By one thread, once; then fence_barrier_init and a barrier of the block before anyone uses it.
  __device__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals)
                 : "memory");
  }
  // Likewise, for arrivals of whole warps.
  __device__ void init_for_warps(std::uint32_t warps) { init(warps * (TERRACE_RACECHECK ? 32U : 1U)); }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
  }
  // By all lanes of a warp: what each of them did before is done for those who wait. One arrival of the warp.
  __device__ void arrive_as_warp() {
    __syncwarp();
    if (TERRACE_RACECHECK || threadIdx.x % 32 == 0) arrive();
  }
  // One arrival that also announces `bytes` to come by bulk copies.
  __device__ void arrive_expecting(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)),
                 "r"(bytes)
                 : "memory");
  }
  [[nodiscard]] __device__ bool try_wait(std::uint32_t parity) const {
    std::uint32_t done = 0;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(&state)), "r"(parity)
        : "memory");
    return done != 0;
  }
  __device__ void wait(std::uint32_t parity) const {
    while (!try_wait(parity)) {
    }
  }
};

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Shared memory written by ordinary stores, before wgmma or a bulk copy touches it: by each writing thread,
// followed by a barrier.
__device__ inline void fence_shared_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of `threads` threads (a multiple of 32) under a number of 1 to 15; 0 is __syncthreads. Those who
// arrive do not wait, except for racecheck: the others must come without anything that is done after the
// arrival.
__device__ inline void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int number, int threads) {
#if TERRACE_RACECHECK
  named_barrier_sync(number, threads);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
#endif
}

// Registers a thread of this warpgroup, a multiple of 8 in 24..256; by all of its warps, in one branch a
// role. Works only with a cap at entry, __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ inline void take_registers() {
#if TERRACE_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ inline void give_registers() {
#if TERRACE_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// One lane of a converged warp, always the same.
[[nodiscard]] __device__ inline bool elected_lane() {
  std::uint32_t elected = 0;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace terrace::trainer::cuda::hopper
