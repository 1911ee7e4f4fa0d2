// Blocks of 8-bit whole numbers, made and undone: a warp a block, a lane four numbers that lie together.
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kBlockWarps = 8;
constexpr int kThreads = kBlockWarps * kWarp;
constexpr int kFour = 4;
static_assert(kBlockWidth == kWarp * kFour);

// Of this thread: its block's place among all, where its numbers begin, and how many there are (0 to 4; none
// in warps past the end).
struct Place {
  std::int64_t block, first;
  int count;
};
__device__ Place place_of(std::int64_t rows, std::int64_t width) {
  const std::int64_t across = blocks_of(width);
  const std::int64_t block = std::int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarp;
  const std::int64_t row = block / across;
  const std::int64_t column = block % across * kBlockWidth + threadIdx.x % kWarp * kFour;
  if (row >= rows || column >= width) return {block, 0, 0};
  const std::int64_t left = width - column;
  return {block, row * width + column, left < kFour ? static_cast<int>(left) : kFour};
}

enum class Reach : std::uint8_t { kOne, kFour };  // numbers a load or a store takes

template <typename T, Reach kReach>
__global__ void __launch_bounds__(kThreads) quantise_blocks(QuantiseBlocks op) {
  const Place at = place_of(op.rows, op.width);
  const T* from = op.x.as<T>() + at.first;
  float x[kFour] = {};
  if constexpr (kReach == Reach::kFour) {
    if (at.count > 0) {
      const float4 four = load_four(from);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      if (i < at.count) x[i] = load_float(from + i);
    }
  }
  unsigned amax = 0;
#pragma unroll
  for (const float each : x) amax = max(amax, __float_as_uint(each) & 0x7FFFFFFFU);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    amax = max(amax, __shfl_xor_sync(kFullWarp, amax, offset));
  }
  if (at.count == 0) return;
  const BlockScale by = block_scale(amax);
  if (threadIdx.x % kWarp == 0) op.scale[at.block] = by.scale;
  signed char q[kFour];
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    q[i] = by.factor == 0.0F ? 0 : static_cast<signed char>(__float2int_rn(__fmul_rn(x[i], by.factor)));
  }
  std::int8_t* to = op.q + at.first;
  if constexpr (kReach == Reach::kFour) {
    *reinterpret_cast<char4*>(to) = make_char4(q[0], q[1], q[2], q[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      if (i < at.count) to[i] = q[i];
    }
  }
}

template <typename T, Reach kReach>
__global__ void __launch_bounds__(kThreads) dequantise_blocks(DequantiseBlocks op) {
  const Place at = place_of(op.rows, op.width);
  if (at.count == 0) return;
  const float scale = op.scale[at.block];
  const std::int8_t* from = op.q + at.first;
  T* to = op.y.as<T>() + at.first;
  if constexpr (kReach == Reach::kFour) {
    const char4 q = *reinterpret_cast<const char4*>(from);
    store_four(to,
               {__fmul_rn(q.x, scale), __fmul_rn(q.y, scale), __fmul_rn(q.z, scale), __fmul_rn(q.w, scale)});
  } else {
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      if (i < at.count) store_float(to + i, __fmul_rn(from[i], scale));
    }
  }
}

Grid grid_of(std::int64_t rows, std::int64_t width) {
  return {.x = ceil_div(rows * blocks_of(width), kBlockWarps), .threads = kThreads};
}
bool in_fours(std::int64_t width, const void* numbers, const void* q) {
  return width % kFour == 0 && aligned(numbers) && aligned(q, kFour);
}

}  // namespace

void launch(OpCall& call, const QuantiseBlocks& op) {
  call.set_shape({op.rows, op.width});
  if (op.rows <= 0 || op.width <= 0) return;
  with_element(op.x.dtype(), [&](auto element) {
    using T = decltype(element);
    const Grid grid = grid_of(op.rows, op.width);
    if (in_fours(op.width, op.x.at(), op.q)) {
      call.launch(quantise_blocks<T, Reach::kFour>, grid, op);
    } else {
      call.launch(quantise_blocks<T, Reach::kOne>, grid, op);
    }
  });
}

void launch(OpCall& call, const DequantiseBlocks& op) {
  call.set_shape({op.rows, op.width});
  if (op.rows <= 0 || op.width <= 0) return;
  with_element(op.y.dtype(), [&](auto element) {
    using T = decltype(element);
    const Grid grid = grid_of(op.rows, op.width);
    if (in_fours(op.width, op.y.at(), op.q)) {
      call.launch(dequantise_blocks<T, Reach::kFour>, grid, op);
    } else {
      call.launch(dequantise_blocks<T, Reach::kOne>, grid, op);
    }
  });
}

}  // namespace terrace::trainer::cuda
