// The exchange through ring buffers on a GPU: runtime/ring_block.hpp with a thread block as its Block.
//
// Payload moves in one of two ways. RingCopy::kBulk: thread 0 has the copy unit of its processor bring 16 KiB
// stages into shared memory and write them from there, over NVLink where the target is a peer's; the other
// threads wait at the barrier. RingCopy::kVector, and whatever is shorter or not aligned: 16-byte vectors,
// eight loads of a thread in flight, coalesced, 512 bytes a warp and instruction. Only thread 0 fences
// (release at system scope, which covers what the others wrote before the barrier); other blocks of the
// processor fill the link meanwhile. The floor is the link: message / 450 GB/s raw, of which a copy reaches
// 393 on an H200.
//
// Bulk copies go by the async proxy. What thread 0 acquired by an ordinary load is made to hold for them by a
// proxy fence behind the wait; they are complete, writes included, before a copy returns, and a second fence
// puts them before the release of the stamp.
#include "runtime/ring_block.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TERRACE_RING_BULK 1
#endif

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

// In dynamic shared memory where a launch copies in bulk: kRingBulkStages stages.
extern __shared__ __align__(128) unsigned char bulk_stages[];

// A stage is filled by a load, which moves its barrier on, and emptied by a store. Thread 0 alone uses it.
class BulkCopier {
 public:
  __device__ void start() {
#ifdef TERRACE_RING_BULK
    for (std::uint32_t stage = 0; stage < kRingBulkStages; ++stage) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&filled_[stage])) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    phases_ = 0;
#endif
  }
  // Ordinary reads and writes of this thread, and bulk copies: those before this call before those behind it.
  __device__ static void fence() {
#ifdef TERRACE_RING_BULK
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
  }
  // Complete when it returns. Precondition: all three are multiples of 16.
  __device__ void copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
#ifdef TERRACE_RING_BULK
    const auto count = static_cast<std::uint32_t>((bytes + kRingBulkStage - 1) / kRingBulkStage);
    const auto size = [&](std::uint32_t at) {
      return static_cast<std::uint32_t>(
          ring_least(kRingBulkStage, bytes - std::uint64_t{at} * kRingBulkStage));
    };
    for (std::uint32_t at = 0; at < count && at < kRingBulkStages; ++at) load(at, from, size(at));
    for (std::uint32_t at = 0; at < count; ++at) {
      store(at, to, size(at));
      // The stage of the store before this one, once that has read it: this one's may be read meanwhile.
      const std::uint32_t next = at + kRingBulkStages - 1;
      if (at == 0 || next >= count) continue;
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      load(next, from, size(next));
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    fence();
#endif
  }

 private:
#ifdef TERRACE_RING_BULK
  __device__ static std::uint32_t shared(const void* at) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
  }
  __device__ static std::uint32_t stage_of(std::uint32_t at) {
    return shared(bulk_stages) + at % kRingBulkStages * kRingBulkStage;
  }
  __device__ void load(std::uint32_t at, const std::byte* from, std::uint32_t bytes) {
    const std::uint32_t filled = shared(&filled_[at % kRingBulkStages]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(filled), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            stage_of(at)),
        "l"(__cvta_generic_to_global(from + std::uint64_t{at} * kRingBulkStage)), "r"(bytes), "r"(filled)
        : "memory");
  }
  // Waits for the load into the stage first.
  __device__ void store(std::uint32_t at, std::byte* to, std::uint32_t bytes) {
    const std::uint32_t bit = 1U << (at % kRingBulkStages);
    const std::uint32_t filled = shared(&filled_[at % kRingBulkStages]);
    const std::uint32_t parity = (phases_ & bit) != 0 ? 1 : 0;
    std::uint32_t there = 0;
    while (there == 0) {
      asm volatile(
          "{\n\t"
          ".reg .pred p;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t"
          "}"
          : "=r"(there)
          : "r"(filled), "r"(parity)
          : "memory");
    }
    phases_ ^= bit;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to + std::uint64_t{at} * kRingBulkStage)),
                 "r"(stage_of(at)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
#endif

  std::uint64_t filled_[kRingBulkStages];
  std::uint32_t phases_;  // which of two phases each barrier is in
};

class ThreadBlock {
 public:
  // `copier` is in shared memory; null: no bulk copies.
  __device__ explicit ThreadBlock(BulkCopier* copier) : copier_(copier) {
    if (leads_bulk()) copier_->start();
  }
  __device__ std::uint32_t thread() const { return threadIdx.x; }
  __device__ std::uint32_t threads() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool agree(bool mine) const {
    const bool all = __syncthreads_and(mine ? 1 : 0) != 0;
    if (leads_bulk()) BulkCopier::fence();
    return all;
  }

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
    if (copier_ != nullptr && bits % sizeof(uint4) == 0 && bytes >= kRingBulkStage) {
      if (leads_bulk()) copier_->copy(to, from, bytes);
    } else if (bits % sizeof(uint4) == 0) {
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
  __device__ bool leads_bulk() const { return copier_ != nullptr && threadIdx.x == 0; }

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

  BulkCopier* copier_;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    terrace_ring_exchange(const __grid_constant__ RingExchange exchange) {
#ifdef TERRACE_RING_BULK
  __shared__ BulkCopier copier;
  ThreadBlock block(exchange.copy == RingCopy::kBulk ? &copier : nullptr);
#else
  ThreadBlock block(nullptr);
#endif
  ring_run(exchange, block, blockIdx.x);
}

}  // namespace terrace
