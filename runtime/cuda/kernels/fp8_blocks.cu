// Numbers packed as 8-bit floats on a GPU: a warp a block of 128, four numbers in a row a lane.
//
// Both kernels are bound by memory: of bf16 each reads or writes 2 bytes a number on one side and 1.008 on
// the other. A warp's accesses are whole lines, 512 bytes of fp32, 256 of bf16, 128 of codes.
#include "runtime/fp8_blocks.hpp"

namespace terrace {
namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kLanes;
constexpr unsigned kOfLane = 4;  // numbers
constexpr unsigned kAll = 0xFFFFFFFF;
constexpr unsigned kAbsolute = 0x7FFFFFFF;
constexpr unsigned kInfinityBits = 0x7F800000;

__device__ bool finite(float number) { return (fp8_bits(number) & kAbsolute) < kInfinityBits; }

// The lane's numbers; zeros behind the end, which change no largest and no sum.
__device__ void load(const Fp8Blocks& blocks, std::uint64_t first, float (&to)[kOfLane]) {
  const bool whole = first + kOfLane <= blocks.count;
  if (blocks.element == Element::kF32) {
    const float* from = reinterpret_cast<const float*>(blocks.numbers) + first;
    if (whole) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      return;
    }
    for (unsigned i = 0; i < kOfLane; ++i) to[i] = first + i < blocks.count ? from[i] : 0.0F;
    return;
  }
  const std::uint16_t* from = reinterpret_cast<const std::uint16_t*>(blocks.numbers) + first;
  if (whole) {
    const uint2 four = *reinterpret_cast<const uint2*>(from);
    to[0] = fp8_float(four.x << 16), to[1] = fp8_float(four.x & 0xFFFF0000U);
    to[2] = fp8_float(four.y << 16), to[3] = fp8_float(four.y & 0xFFFF0000U);
    return;
  }
  for (unsigned i = 0; i < kOfLane; ++i)
    to[i] = first + i < blocks.count ? fp8_float(static_cast<std::uint32_t>(from[i]) << 16) : 0.0F;
}

__device__ void store(const Fp8Blocks& blocks, std::uint64_t first, const float (&from)[kOfLane]) {
  const bool whole = first + kOfLane <= blocks.count;
  if (blocks.element == Element::kF32) {
    float* to = reinterpret_cast<float*>(blocks.numbers) + first;
    if (whole) {
      *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
      return;
    }
    for (unsigned i = 0; i < kOfLane && first + i < blocks.count; ++i) to[i] = from[i];
    return;
  }
  std::uint16_t* to = reinterpret_cast<std::uint16_t*>(blocks.numbers) + first;
  if (whole) {
    *reinterpret_cast<uint2*>(to) = make_uint2((fp8_bits(from[0]) >> 16) | (fp8_bits(from[1]) & 0xFFFF0000U),
                                               (fp8_bits(from[2]) >> 16) | (fp8_bits(from[3]) & 0xFFFF0000U));
    return;
  }
  for (unsigned i = 0; i < kOfLane && first + i < blocks.count; ++i)
    to[i] = static_cast<std::uint16_t>(fp8_bits(from[i]) >> 16);
}

struct Seen {  // by one lane, of every block it had a part in
  double error, magnitude;
  float largest_share;
};

__device__ void pack_block(const Fp8Blocks& blocks, std::uint64_t block, Seen& seen) {
  const unsigned lane = threadIdx.x % kLanes;
  const std::uint64_t first = block * kFp8Block + lane * kOfLane;
  float numbers[kOfLane];
  load(blocks, first, numbers);
  unsigned largest = 0;  // bits of a positive float order as it does
  for (unsigned i = 0; i < kOfLane; ++i)
    if (finite(numbers[i])) largest = max(largest, fp8_bits(numbers[i]) & kAbsolute);
  largest = __reduce_max_sync(kAll, largest);
  const int exponent = fp8_exponent(largest);
  const float scale = fp8_power(exponent);
  const float inverse = fp8_power(-exponent);
  std::uint32_t codes = 0;
  float most_off = 0;
  for (unsigned i = 0; i < kOfLane; ++i) {
    const std::uint32_t code = fp8_encode(numbers[i], inverse);
    codes |= code << (8 * i);
    if (!finite(numbers[i])) continue;
    const float off = fabsf(numbers[i] - fp8_decode(code, scale));
    most_off = fmaxf(most_off, off);
    seen.error += off;
    seen.magnitude += fabsf(numbers[i]);
  }
  // Codes behind the last number's 16 are the next part's: the exponents.
  if (first < fp8_code_bytes(blocks.count)) *reinterpret_cast<std::uint32_t*>(blocks.packed + first) = codes;
  if (lane == 0)
    blocks.packed[fp8_code_bytes(blocks.count) + block] = static_cast<std::byte>(exponent & 0xFF);
  if (largest > 0) seen.largest_share = fmaxf(seen.largest_share, most_off / fp8_float(largest));
}

// One add of a thread block: what the lanes saw, by warp, then by the first warp.
__device__ void add_up(Fp8Error* error, Seen seen) {
  __shared__ Seen of_warp[kWarps];
  for (unsigned step = kLanes / 2; step > 0; step /= 2) {
    seen.error += __shfl_xor_sync(kAll, seen.error, step);
    seen.magnitude += __shfl_xor_sync(kAll, seen.magnitude, step);
    seen.largest_share = fmaxf(seen.largest_share, __shfl_xor_sync(kAll, seen.largest_share, step));
  }
  if (threadIdx.x % kLanes == 0) of_warp[threadIdx.x / kLanes] = seen;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned warp = 1; warp < kWarps; ++warp) {
    seen.error += of_warp[warp].error;
    seen.magnitude += of_warp[warp].magnitude;
    seen.largest_share = fmaxf(seen.largest_share, of_warp[warp].largest_share);
  }
  atomicAdd(&error->error_sum, seen.error);
  atomicAdd(&error->magnitude_sum, seen.magnitude);
  atomicMax(reinterpret_cast<int*>(&error->largest_share), static_cast<int>(fp8_bits(seen.largest_share)));
}

__device__ std::uint64_t first_block() {
  return static_cast<std::uint64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
}
__device__ std::uint64_t block_stride() { return static_cast<std::uint64_t>(gridDim.x) * kWarps; }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    terrace_fp8_pack(const __grid_constant__ Fp8Blocks blocks) {
  Seen seen{};
  for (std::uint64_t block = first_block(); block < fp8_blocks(blocks.count); block += block_stride())
    pack_block(blocks, block, seen);
  if (blocks.error != nullptr) add_up(blocks.error, seen);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    terrace_fp8_unpack(const __grid_constant__ Fp8Blocks blocks) {
  const unsigned lane = threadIdx.x % kLanes;
  for (std::uint64_t block = first_block(); block < fp8_blocks(blocks.count); block += block_stride()) {
    const std::uint64_t first = block * kFp8Block + lane * kOfLane;
    const auto exponent = static_cast<signed char>(blocks.packed[fp8_code_bytes(blocks.count) + block]);
    const float scale = fp8_power(exponent);
    if (first >= blocks.count) continue;
    const std::uint32_t codes = *reinterpret_cast<const std::uint32_t*>(blocks.packed + first);
    float numbers[kOfLane];
    for (unsigned i = 0; i < kOfLane; ++i) numbers[i] = fp8_decode(codes >> (8 * i) & 0xFF, scale);
    store(blocks, first, numbers);
  }
}

}  // namespace terrace
