// The warp instructions of the chunked KDA kernels, and how their tiles lie in memory. Pairs of 16-bit
// numbers, bf16 or fp16, travel as one 32-bit word, the lower index in the lower half. A warp's lane l has
// group g = l / 4 and quad q = l % 4; an accumulator of m16n8 holds rows g, g, g + 8, g + 8 and columns 2q,
// 2q + 1, 2q, 2q + 1.
//
// Tiles have 64 or 128 rows of 16-bit numbers in pieces of 16 bytes, permuted so that the eight rows an
// ldmatrix reads fall into different banks. A tile lies in scratch as it lies in shared memory: one bulk copy
// brings it.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"

namespace terrace::trainer::cuda {

__device__ inline void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_half(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void load_matrices(std::uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(hopper::shared_address(row))
               : "memory");
}
__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(hopper::shared_address(row))
               : "memory");
}
__device__ inline void store_matrices_transposed(void* row, const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   hopper::shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
__device__ inline std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t pair = 0;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two fp16 numbers, the lower index in the lower half.
__device__ inline std::uint32_t pack_half(float low, float high) {
  std::uint32_t pair = 0;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ inline std::uint32_t multiply_halves(std::uint32_t x, std::uint32_t y) {
  std::uint32_t pair = 0;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
  return pair;
}
// The larger of each of two unsigned 16-bit numbers.
__device__ inline std::uint32_t max_of_each(std::uint32_t x, std::uint32_t y) {
  std::uint32_t pair = 0;
  asm("max.u16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
  return pair;
}
__device__ inline float exp2_fast(float x) {
  float y = 0;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_fast(float x) {
  float y = 0;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_fast(float x) {
  float y = 0;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Global to shared memory, 16-byte aligned, a multiple of 16 bytes; counts on `full`.
__device__ inline void load_bulk(void* shared, const void* global, std::uint32_t bytes,
                                 hopper::Barrier* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          hopper::shared_address(shared)),
      "l"(global), "r"(bytes), "r"(hopper::shared_address(&full->state))
      : "memory");
}
__device__ inline float low_half(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000U); }
// Two whole numbers of 16 bits with a sign: adding 1.5 2^23 leaves them in a float's lower half.
__device__ inline std::uint32_t pack_fixed(float low, float high) {
  constexpr float kWhole = 12582912.0F;
  return (__float_as_uint(low + kWhole) & 0xffffU) | (__float_as_uint(high + kWhole) << 16);
}
__device__ inline float2 unpack_fixed(std::uint32_t pair) {
  constexpr std::uint32_t kWhole = 0x4b000000U, kSigns = 0x80008000U;  // 2^23
  pair ^= kSigns;
  return make_float2(__uint_as_float(kWhole | (pair & 0xffffU)) - 8421376.0F,
                     __uint_as_float(kWhole | (pair >> 16)) - 8421376.0F);
}
// What rounding two numbers to the bf16 `pair` left of them, itself in bf16: with it they have 16 bits.
__device__ inline std::uint32_t rest_of(std::uint32_t pair, float low, float high) {
  return pack_bf16(low - low_half(pair), high - high_half(pair));
}

// Where piece `piece` (8 numbers) of a row lies, in bytes.
struct WideTile {  // 128 columns
  static __device__ int at(int row, int piece) { return row * 256 + ((piece ^ (row & 7)) << 4); }
};
struct SquareTile {  // 64 columns
  static __device__ int at(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
};
struct ColumnTile {  // 64 rows; sixteen columns at a time lie together, 2 KiB
  static __device__ int at(int row, int piece) {
    return (piece >> 1) * 2048 + row * 32 + (((piece & 1) ^ ((row >> 2) & 1)) << 4);
  }
};

// Operand A, m16 x k16, of a tile stored by rows of A: rows from `row`, columns from piece `piece`.
template <typename Tile>
__device__ void load_a(std::uint32_t (&to)[4], const unsigned char* tile, int row, int piece) {
  const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
  load_matrices(to, tile + Tile::at(row + (matrix & 1) * 8 + r, piece + (matrix >> 1)));
}
// The same of a tile stored transposed: k from `row`, m from piece `piece`.
template <typename Tile>
__device__ void load_a_transposed(std::uint32_t (&to)[4], const unsigned char* tile, int row, int piece) {
  const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
  load_matrices_transposed(to, tile + Tile::at(row + (matrix >> 1) * 8 + r, piece + (matrix & 1)));
}
// Operand B, k16 x n16, of a tile stored by rows of n: to[0..1] is the first n8, to[2..3] the second.
template <typename Tile>
__device__ void load_b(std::uint32_t (&to)[4], const unsigned char* tile, int row, int piece) {
  const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
  load_matrices(to, tile + Tile::at(row + (matrix >> 1) * 8 + r, piece + (matrix & 1)));
}
// The same of a tile stored by rows of k: k from `row`, n from piece `piece`.
template <typename Tile>
__device__ void load_b_transposed(std::uint32_t (&to)[4], const unsigned char* tile, int row, int piece) {
  const int lane = static_cast<int>(threadIdx.x) & 31, matrix = lane >> 3, r = lane & 7;
  load_matrices_transposed(to, tile + Tile::at(row + (matrix & 1) * 8 + r, piece + (matrix >> 1)));
}

// Two accumulator tiles side by side as operand A in fp16.
__device__ inline void as_half_operand(const float (&left)[4], const float (&right)[4],
                                       std::uint32_t (&a)[4]) {
  a[0] = pack_half(left[0], left[1]);
  a[1] = pack_half(left[2], left[3]);
  a[2] = pack_half(right[0], right[1]);
  a[3] = pack_half(right[2], right[3]);
}

}  // namespace terrace::trainer::cuda
