// The device side of what both passes of dense attention share on Hopper.
#pragma once

#include <cuda_bf16.h>

#include "examples/moe_trainer/ops/cuda/attention_hopper.hpp"
#include "examples/moe_trainer/ops/cuda/hopper/tma.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/wgmma.cuh"

namespace terrace::trainer::cuda {

inline constexpr int kProducerRegisters = 24;
inline constexpr int kConsumerRegisters = 240;
inline constexpr int kConsumers = 2;  // warpgroups; each owns 64 rows
inline constexpr int kGroupRows = 64;
inline constexpr int kAttentionThreads = (1 + kConsumers) * hopper::kWarpgroup;
inline constexpr int kConsumerWarps = kConsumers * hopper::kWarpgroup / 32;
inline constexpr int kBlockRows = kConsumers * kGroupRows;

// kRows rows of one head, kWidth wide.
template <int kRows, int kWidth>
struct alignas(1024) Tile {
  static constexpr int kBoxBytes = kRows * kBoxRowBytes;
  static constexpr int kBytes = kWidth / kBoxColumns * kBoxBytes;
  unsigned char bytes[kBytes];

  // By one thread; counts kBytes on the barrier.
  __device__ void load(const CUtensorMap& map, hopper::Barrier* full, int row, int head, int batch) {
#pragma unroll
    for (int box = 0; box < kWidth / kBoxColumns; ++box) {
      hopper::load_box(bytes + box * kBoxBytes, &map, full, hopper::At4{box * kBoxColumns, row, head, batch});
    }
  }
  // Its rows from `row` (a multiple of 8) on as an operand whose k are the columns, 16 * step and on.
  [[nodiscard]] __device__ hopper::Operand by_columns(int row, int step) const {
    constexpr int kSteps = kBoxColumns / 16;
    return hopper::k_major(bytes + step / kSteps * kBoxBytes + row * kBoxRowBytes)
        .advanced(step % kSteps * hopper::kKMajorStepBytes);
  }
  // All of its columns as the right operand whose k are the rows, 16 * step and on.
  [[nodiscard]] __device__ hopper::Operand by_rows(int step) const {
    return hopper::mn_major(bytes + step * hopper::kMnMajorStepBytes, kBoxBytes);
  }
};

// sum = rows of `own` from own_row on, times rows of `other` transposed: (64, kRows).
template <int kOwnRows, int kRows, int kWidth>
__device__ inline void dot_rows(const Tile<kOwnRows, kWidth>& own, int own_row,
                                const Tile<kRows, kWidth>& other, float (&sum)[kRows / 2]) {
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) {
    hopper::wgmma_bf16<kRows, hopper::Major::kK, hopper::Major::kK>(
        sum, own.by_columns(own_row, step), other.by_columns(0, step),
        step == 0 ? hopper::Start::kZero : hopper::Start::kAccumulate);
  }
}
// sum (64, kWidth) += left (64, kRows), in registers, times the rows of `other`.
template <int kRows, int kWidth>
__device__ inline void add_rows(const std::uint32_t (&left)[kRows / 16][4], const Tile<kRows, kWidth>& other,
                                float (&sum)[kWidth / 2]) {
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    hopper::wgmma_bf16<kWidth, hopper::Major::kMN>(sum, left[step], other.by_rows(step),
                                                   hopper::Start::kAccumulate);
  }
}

// 2^x, relative error 2^-22; results below the normal range are zero.
__device__ inline float power_of_two(float x) {
  float y = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline std::uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
// Accumulators as a left operand: both have the same places, two numbers of a row a register.
template <int kRows>
__device__ inline void pack_left(const float (&from)[kRows / 2], std::uint32_t (&to)[kRows / 16][4]) {
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) to[i / 4][i % 4] = pack_pair(from[2 * i], from[2 * i + 1]);
}

__device__ inline float unpack(std::uint32_t pair, int which) {
  return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000U);
}

// Where thread t of a warpgroup holds accumulator i: rows row() and row() + 8, columns 8 (i / 4) + column() +
// i % 2.
__device__ inline int accumulator_row() {
  return static_cast<int>(threadIdx.x) % hopper::kWarpgroup / 32 * 16 +
         static_cast<int>(threadIdx.x) % 32 / 4;
}
__device__ inline int accumulator_column() { return static_cast<int>(threadIdx.x) % 4 * 2; }

// Rows row and row + 8 of a head, where they exist, = factor times the accumulators.
template <int kCount>
__device__ inline void put_accumulators(const float (&sum)[kCount], const float (&factor)[2],
                                        __nv_bfloat16* head, std::int64_t step, int row, int length) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= length) continue;
    __nv_bfloat16* to = head + (row + 8 * half) * step + accumulator_column();
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      *reinterpret_cast<std::uint32_t*>(to + 8 * i) =
          pack_pair(sum[4 * i + 2 * half] * factor[half], sum[4 * i + 2 * half + 1] * factor[half]);
    }
  }
}

// The block's dynamic shared memory as one object.
template <typename Shared>
__device__ inline Shared& aligned_shared(unsigned char* raw) {
  constexpr std::uintptr_t kAlign = alignof(Shared);
  return *reinterpret_cast<Shared*>((reinterpret_cast<std::uintptr_t>(raw) + kAlign - 1) / kAlign * kAlign);
}
template <typename Shared>
inline constexpr std::size_t kSharedBytes = sizeof(Shared) + alignof(Shared);

// A stage of a ring and the parity of its current round.
template <int kStages>
struct Turn {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace terrace::trainer::cuda
