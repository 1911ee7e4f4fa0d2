// Warpgroup matrix products (wgmma): d (64, kN) fp32 [+]= A (64, k) B (k, kN), by 128 threads together, k =
// 16 for bf16 and 32 for e4m3. sm_90a only.
//
// Shared-memory operands are described by 64 bits. Here always the 128-byte swizzle, the operand's first byte
// (at k = 0, row 0) at a multiple of 1024 bytes, as a TMA box of 128-byte rows leaves it:
//   bits  0-13  start address / 16
//   bits 16-29  "leading" byte offset / 16
//   bits 32-45  "stride" byte offset / 16
//   bits 62-63  1: 128-byte swizzle
// K-major: k is contiguous; one 128-byte row holds 64 (bf16) or 128 (e4m3) numbers of k for one m (or n), and
//   row r is at 128 r. Stride offset: from 8 rows to the next 8, 1024 bytes. Leading offset: not used (1).
//   The next k of one instruction (16 bf16, 32 e4m3) is 32 bytes on.
// MN-major (bf16 only): m (or n) is contiguous; a box is 64 of them wide and has a row of 128 bytes for each
// k.
//   Leading offset: from one box of 64 to the next 64 of m (or n). Stride offset: from 8 k to the next 8,
//   1024 bytes. The next k of one instruction (16) is 16 rows, 2048 bytes on.
// Accumulators: d[i] of thread t (0 to 127): row 16 (t / 32) + t % 32 / 4 + 8 (i / 2 % 2),
//   column 8 (i / 4) + 2 (t % 4) + i % 2.
// A from registers (bf16, m64k16): a[0] rows t%32/4, k 2 (t%4) and +1; a[1] rows + 8; a[2] k + 8; a[3] both;
//   rows counted from 16 (t / 32).
//
// Order: fence_wgmma (registers and shared memory as they are now), products, commit_wgmma, wait_wgmma.
// Between commit and wait no one may touch d: keep_registers(d) on both sides says so to the compiler.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"

namespace terrace::trainer::cuda::hopper {

enum class Major : int { kK = 0, kMN = 1 };

// k_step_bytes for advance(): what one instruction's k takes in the operand.
inline constexpr int kKMajorStepBytes = 32;
inline constexpr int kMnMajorStepBytes = 2048;

struct Operand {
  std::uint64_t bits;
  // `bytes` further on: to the next k, or to other rows (multiples of 1024 bytes).
  [[nodiscard]] __device__ Operand advanced(int bytes) const {
    return {bits + (static_cast<std::uint32_t>(bytes) >> 4)};
  }
};
__device__ inline Operand make_operand(const void* shared, int leading_bytes) {
  constexpr std::uint64_t kStride = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return {std::uint64_t{(shared_address(shared) & 0x3FFFF) >> 4} |
          (std::uint64_t{static_cast<std::uint32_t>(leading_bytes) >> 4} << 16) | kStride | kSwizzle128};
}
__device__ inline Operand k_major(const void* shared) { return make_operand(shared, 16); }
// box_bytes: from one box of 64 columns to the next.
__device__ inline Operand mn_major(const void* shared, int box_bytes) {
  return make_operand(shared, box_bytes);
}

__device__ inline void fence_wgmma() {
#if TERRACE_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void commit_wgmma() {
#if TERRACE_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most kPending groups are unfinished.
template <int kPending>
__device__ inline void wait_wgmma() {
#if TERRACE_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
template <int kCount>
__device__ inline void keep_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

enum class Start : int { kZero = 0, kAccumulate = 1 };  // the first product of a sum, or a further one

// The text of 32 register operands, and the operands: asm takes nothing else.
#define TERRACE_TEXT_0                                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TERRACE_TEXT_32                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TERRACE_TEXT_64                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TERRACE_TEXT_96                                                                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TERRACE_D4(i) "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define TERRACE_D16(i) TERRACE_D4(i), TERRACE_D4((i) + 4), TERRACE_D4((i) + 8), TERRACE_D4((i) + 12)
#define TERRACE_D32(i) TERRACE_D16(i), TERRACE_D16((i) + 16)
#define TERRACE_TEXT_N64 TERRACE_TEXT_0
#define TERRACE_TEXT_N128 TERRACE_TEXT_N64 TERRACE_TEXT_32
#define TERRACE_TEXT_N192 TERRACE_TEXT_N128 TERRACE_TEXT_64
#define TERRACE_TEXT_N256 TERRACE_TEXT_N192 TERRACE_TEXT_96
#define TERRACE_D_N64 TERRACE_D32(0)
#define TERRACE_D_N128 TERRACE_D_N64, TERRACE_D32(32)
#define TERRACE_D_N192 TERRACE_D_N128, TERRACE_D32(64)
#define TERRACE_D_N256 TERRACE_D_N192, TERRACE_D32(96)

// p0 to p6: the numbers of the operands that follow the accumulators.
#define TERRACE_WGMMA_BF16_SS(width, p0, p1, p2, p3, p4)                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2                                                  \
               ", 0;\n"                                                                                  \
               "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16 {" TERRACE_TEXT_N##width    \
               "}, %" #p0 ", %" #p1 ", p, 1, 1, %" #p3 ", %" #p4 ";\n}\n"                                \
               : TERRACE_D_N##width                                                                      \
               : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(start)), "n"(static_cast<int>(kMajorA)), \
                 "n"(static_cast<int>(kMajorB)))
#define TERRACE_WGMMA_BF16_RS(width, p0, p1, p2, p3, p4, p5, p6)                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p5                                                 \
               ", 0;\n"                                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16 {" TERRACE_TEXT_N##width   \
               "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1, %" #p6 ";\n}\n"         \
               : TERRACE_D_N##width                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(static_cast<int>(start)), \
                 "n"(static_cast<int>(kMajorB)))
#define TERRACE_WGMMA_E4M3_SS(width, p0, p1, p2)                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2                                               \
               ", 0;\n"                                                                               \
               "wgmma.mma_async.sync.aligned.m64n" #width "k32.f32.e4m3.e4m3 {" TERRACE_TEXT_N##width \
               "}, %" #p0 ", %" #p1 ", p, 1, 1;\n}\n"                                                 \
               : TERRACE_D_N##width                                                                   \
               : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(start)))

// kN: 64, 128, 192 or 256. Both operands from shared memory.
template <int kN, Major kMajorA, Major kMajorB>
__device__ inline void wgmma_bf16(float (&d)[kN / 2], Operand a, Operand b, Start start) {
#if TERRACE_SM90A
  if constexpr (kN == 64) {
    TERRACE_WGMMA_BF16_SS(64, 32, 33, 34, 35, 36);
  } else if constexpr (kN == 128) {
    TERRACE_WGMMA_BF16_SS(128, 64, 65, 66, 67, 68);
  } else if constexpr (kN == 192) {
    TERRACE_WGMMA_BF16_SS(192, 96, 97, 98, 99, 100);
  } else {
    static_assert(kN == 256);
    TERRACE_WGMMA_BF16_SS(256, 128, 129, 130, 131, 132);
  }
#endif
}
// A from registers (K-major by its nature).
template <int kN, Major kMajorB>
__device__ inline void wgmma_bf16(float (&d)[kN / 2], const std::uint32_t (&a)[4], Operand b, Start start) {
#if TERRACE_SM90A
  if constexpr (kN == 64) {
    TERRACE_WGMMA_BF16_RS(64, 32, 33, 34, 35, 36, 37, 38);
  } else if constexpr (kN == 128) {
    TERRACE_WGMMA_BF16_RS(128, 64, 65, 66, 67, 68, 69, 70);
  } else if constexpr (kN == 192) {
    TERRACE_WGMMA_BF16_RS(192, 96, 97, 98, 99, 100, 101, 102);
  } else {
    static_assert(kN == 256);
    TERRACE_WGMMA_BF16_RS(256, 128, 129, 130, 131, 132, 133, 134);
  }
#endif
}
// e4m3, both K-major.
template <int kN>
__device__ inline void wgmma_e4m3(float (&d)[kN / 2], Operand a, Operand b, Start start) {
#if TERRACE_SM90A
  if constexpr (kN == 64) {
    TERRACE_WGMMA_E4M3_SS(64, 32, 33, 34);
  } else if constexpr (kN == 128) {
    TERRACE_WGMMA_E4M3_SS(128, 64, 65, 66);
  } else if constexpr (kN == 192) {
    TERRACE_WGMMA_E4M3_SS(192, 96, 97, 98);
  } else {
    static_assert(kN == 256);
    TERRACE_WGMMA_E4M3_SS(256, 128, 129, 130);
  }
#endif
}

#undef TERRACE_TEXT_0
#undef TERRACE_TEXT_32
#undef TERRACE_TEXT_64
#undef TERRACE_TEXT_96
#undef TERRACE_D4
#undef TERRACE_D16
#undef TERRACE_D32
#undef TERRACE_TEXT_N64
#undef TERRACE_TEXT_N128
#undef TERRACE_TEXT_N192
#undef TERRACE_TEXT_N256
#undef TERRACE_D_N64
#undef TERRACE_D_N128
#undef TERRACE_D_N192
#undef TERRACE_D_N256
#undef TERRACE_WGMMA_BF16_SS
#undef TERRACE_WGMMA_BF16_RS
#undef TERRACE_WGMMA_E4M3_SS

}  // namespace terrace::trainer::cuda::hopper
