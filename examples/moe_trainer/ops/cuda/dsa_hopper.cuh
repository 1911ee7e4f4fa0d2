// What the Hopper kernels of sparse attention share: gathered rows as swizzled tiles, and small products.
//
// A tile is `kRows` rows of bf16 in boxes of 64 columns, box after box: row r of a box is 128 bytes at 128 r,
// its 16-byte pieces permuted by r % 8 (the 128-byte swizzle). Read along the columns it is a K-major
// operand, read along the rows an MN-major one with boxes of 128 kRows bytes.
#pragma once

#include "examples/moe_trainer/ops/cuda/dsa.hpp"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/wgmma.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {

inline constexpr int kDsaHeads = 64;  // rows of a matrix instruction; fewer heads are padded with zeros
inline constexpr int kBoxColumns = 64;
inline constexpr float kLog2e = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

// Which attention: key and value widths, and whether the value is the start of the key row.
struct MlaForm {
  static constexpr int kKey = 576, kValue = 512;
  static constexpr bool kShared = true;
};
struct SplitForm {
  static constexpr int kKey = 128, kValue = 128;
  static constexpr bool kShared = false;
};

// Denormal results are zero.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes to shared memory, `bytes` (16 or 0) of them read, the rest zero.
__device__ inline void copy_piece(std::uint32_t to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// One arrival once this thread's copies so far have landed; the barrier counts it as an ordinary one.
__device__ inline void arrive_when_copied(hopper::Barrier& barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(hopper::shared_address(&barrier.state))
      : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A warpgroup's share of a tile: thread t has piece t % 8 of the rows t / 8 + 16 i in every box.
inline constexpr int kRowsAtOnce = hopper::kWarpgroup / 8;
template <int kRows>
struct RowSources {
  const Bf16* row[kRows / kRowsAtOnce];  // null: zeros
};
// `some`: any row as wide as the tile; nothing is read of it.
template <int kRows, int kBoxes>
__device__ inline void copy_tile(std::uint32_t tile, const RowSources<kRows>& from, const Bf16* some) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const int piece = thread % 8, row0 = thread / 8;
  const std::uint32_t to = tile + static_cast<std::uint32_t>(row0 * 128 + ((piece ^ (row0 % 8)) * 16));
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const Bf16* row = from.row[i];
    const std::uint32_t bytes = row != nullptr ? 16 : 0;
    const Bf16* at = (row != nullptr ? row : some) + piece * 8;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      copy_piece(to + static_cast<std::uint32_t>(box * kRows * 128 + i * kRowsAtOnce * 128),
                 at + box * kBoxColumns, bytes);
    }
  }
}
// Rows of consecutive heads of one token, (heads, width).
template <int kRows>
__device__ inline RowSources<kRows> head_rows(const Bf16* first, int heads, int width) {
  RowSources<kRows> rows;
  const int row0 = static_cast<int>(threadIdx.x) % hopper::kWarpgroup / 8;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int head = row0 + i * kRowsAtOnce;
    rows.row[i] = head < heads ? first + std::int64_t{head} * width : nullptr;
  }
  return rows;
}
// The positions this thread gathers for a tile, -1 from the count on.
template <int kRows>
struct TilePositions {
  std::int32_t at[kRows / kRowsAtOnce];
};
template <int kRows>
__device__ inline TilePositions<kRows> tile_positions(const std::int32_t* positions, int tile, int count) {
  TilePositions<kRows> result;
  const int row0 = static_cast<int>(threadIdx.x) % hopper::kWarpgroup / 8;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    const int slot = tile * kRows + row0 + i * kRowsAtOnce;
    result.at[i] = slot < count ? __ldg(positions + slot) : -1;
  }
  return result;
}
template <int kRows>
__device__ inline RowSources<kRows> gathered_rows(const TilePositions<kRows>& positions, const Bf16* sequence,
                                                  int width) {
  RowSources<kRows> rows;
#pragma unroll
  for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
    rows.row[i] = positions.at[i] >= 0 ? sequence + std::int64_t{positions.at[i]} * width : nullptr;
  }
  return rows;
}

// How many positions a row has before its padding; by the whole block, which has nothing else in `cell`.
__device__ inline int chosen_count(const std::int32_t* positions, int slots, int* cell) {
  if (slots == 0) return 0;
  if (__ldg(positions + slots - 1) >= 0) return slots;  // the same for all threads
  if (threadIdx.x == 0) *cell = 0;
  __syncthreads();
  int mine = 0;
  for (int slot = static_cast<int>(threadIdx.x); slot < slots; slot += static_cast<int>(blockDim.x)) {
    mine += __ldg(positions + slot) >= 0 ? 1 : 0;
  }
  if (mine > 0) atomicAdd(cell, mine);  // a count has no order
  __syncthreads();
  return *cell;
}

// d (64, 32) [+]= A B, k = 16, both K-major tiles: the layout of hopper/wgmma.cuh with 16 accumulators.
__device__ inline void wgmma_64x32(float (&d)[16], hopper::Operand a, hopper::Operand b,
                                   hopper::Start start) {
#if TERRACE_SM90A
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, "
      "%13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a.bits), "l"(b.bits), "r"(static_cast<int>(start)));
#endif
}
// d = A (64, 64 kBoxes) B (32, 64 kBoxes)^T from tiles whose boxes are that far apart. Enqueues one group.
template <int kBoxes, int kBoxBytesA, int kBoxBytesB>
__device__ inline void multiply_64x32(float (&d)[16], hopper::Operand a, hopper::Operand b) {
  hopper::keep_registers(d);
  hopper::fence_wgmma();
#pragma unroll
  for (int step = 0; step < kBoxes * 4; ++step) {
    const int in_box = step % 4 * hopper::kKMajorStepBytes;
    wgmma_64x32(d, a.advanced(step / 4 * kBoxBytesA + in_box), b.advanced(step / 4 * kBoxBytesB + in_box),
                step == 0 ? hopper::Start::kZero : hopper::Start::kAccumulate);
  }
  hopper::commit_wgmma();
  hopper::keep_registers(d);
}

// Four lanes hold word[g] of four groups each; lane q gets all four words of group q, in lane order.
__device__ inline uint4 transpose_quad(const std::uint32_t (&word)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 4;
  std::uint32_t got[4];
#pragma unroll
  for (int other = 0; other < 4; ++other) {
    // To lane ^ other goes the word of its group.
    const int to = lane ^ other;
    const std::uint32_t low = (to & 1) != 0 ? word[1] : word[0];
    const std::uint32_t high = (to & 1) != 0 ? word[3] : word[2];
    const std::uint32_t mine = (to & 2) != 0 ? high : low;
    got[other] = other == 0 ? mine : __shfl_xor_sync(kFullWarp, mine, other);
  }
  // got[other] came from lane ^ other and is its place in the result: undo the exclusive or.
  const std::uint32_t a = (lane & 1) != 0 ? got[1] : got[0], b = (lane & 1) != 0 ? got[0] : got[1];
  const std::uint32_t c = (lane & 1) != 0 ? got[3] : got[2], d = (lane & 1) != 0 ? got[2] : got[3];
  return (lane & 2) != 0 ? make_uint4(c, d, a, b) : make_uint4(a, b, c, d);
}

// Calls to(row, column, pieces) with eight columns at a time, rounded, of this thread's rows of an
// accumulator of 2 kCount columns.
template <int kCount, typename To>
__device__ inline void for_row_pieces(const float (&d)[kCount], To&& to) {
  const int thread = static_cast<int>(threadIdx.x) % hopper::kWarpgroup;
  const int row = thread / kWarp * 16 + thread % kWarp / 4;
#pragma unroll
  for (int group = 0; group < kCount / 16; ++group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        word[j] = as_pair(d[group * 16 + j * 4 + half * 2], d[group * 16 + j * 4 + half * 2 + 1]);
      }
      to(row + half * 8, group * 32 + thread % 4 * 8, transpose_quad(word));
    }
  }
}

}  // namespace terrace::trainer::cuda
