// The exchange through ring buffers on a GPU: runtime/ring_block.hpp with a thread block as its Block.
//
// Payload moves as 16-byte vectors, eight loads of a thread in flight, coalesced, 512 bytes a warp and
// instruction. Only thread 0 fences (release at system scope, which covers what the others wrote before the
// barrier); other blocks of the processor fill the link meanwhile. The floor is the link: message / 450 GB/s
// raw, of which a copy reaches 393 on an H200.
#include "runtime/ring_block.hpp"

namespace terrace {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerProcessor = 2;  // 64 registers a thread
constexpr int kInFlight = 8;            // vectors of one thread

// What is read once passes the first-level cache by, and what a peer wrote must never be found there.
__device__ __forceinline__ uint4 read_once(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void write_once(uint4* to, const uint4& value) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

class ThreadBlock {
 public:
  __device__ std::uint32_t thread() const { return threadIdx.x; }
  __device__ std::uint32_t threads() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool agree(bool mine) const { return __syncthreads_and(mine ? 1 : 0) != 0; }

  __device__ std::uint64_t load(const std::uint64_t* word) const {
    std::uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
  }
  __device__ void store(std::uint64_t* word, std::uint64_t value) const {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
  }
  __device__ std::uint64_t add(std::uint64_t* word) const {
    std::uint64_t before;
    asm volatile("atom.add.acq_rel.gpu.u64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
    return before;
  }
  __device__ bool claim(std::uint64_t* word) const {
    std::uint64_t before;
    asm volatile("atom.cas.acq_rel.gpu.b64 %0, [%1], 0, 1;" : "=l"(before) : "l"(word) : "memory");
    return before == 0;
  }
  __device__ std::uint64_t now_ns() const {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  __device__ void pause() const { __nanosleep(64); }

  // A call of its own: inlined at its three uses, the vectors would not find 32 registers free.
  __device__ __noinline__ void copy(std::byte* to, const std::byte* from, std::uint64_t bytes) const {
    const std::uint64_t bits =
        reinterpret_cast<std::uint64_t>(to) | reinterpret_cast<std::uint64_t>(from) | bytes;
    if (bits % sizeof(uint4) == 0) {
      copy_vectors(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from),
                   static_cast<std::uint32_t>(bytes / sizeof(uint4)));
    } else if (bits % sizeof(std::uint32_t) == 0) {
      copy_units(reinterpret_cast<std::uint32_t*>(to), reinterpret_cast<const std::uint32_t*>(from),
                 bytes / sizeof(std::uint32_t));
    } else {
      copy_units(reinterpret_cast<unsigned char*>(to), reinterpret_cast<const unsigned char*>(from), bytes);
    }
  }

 private:
  // All loads of a round before its first store, also in the last, partial one. No copy has 2^32 vectors.
  __device__ __forceinline__ void copy_vectors(uint4* to, const uint4* from, std::uint32_t count) const {
    constexpr std::uint32_t kRound = kInFlight * kThreads;
    std::uint32_t left = count;
    to += threadIdx.x;
    from += threadIdx.x;
    uint4 values[kInFlight];
    for (; left >= kRound; left -= kRound, to += kRound, from += kRound) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) values[i] = read_once(from + i * kThreads);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) write_once(to + i * kThreads, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (threadIdx.x + i * kThreads < left) values[i] = read_once(from + i * kThreads);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (threadIdx.x + i * kThreads < left) write_once(to + i * kThreads, values[i]);
    }
  }
  // Parts that start between two vectors: a byte count of the caller's that no layout of ours asked for. The
  // casts to volatile keep these loads out of the read-only path, as the vectors' are.
  template <typename Unit>
  __device__ __forceinline__ void copy_units(Unit* to, const Unit* from, std::uint64_t count) const {
    for (std::uint64_t at = threadIdx.x; at < count; at += kThreads)
      *static_cast<volatile Unit*>(to + at) = *static_cast<const volatile Unit*>(from + at);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    terrace_ring_exchange(const __grid_constant__ RingExchange exchange) {
  ThreadBlock block;
  ring_run(exchange, block, blockIdx.x);
}

}  // namespace terrace
