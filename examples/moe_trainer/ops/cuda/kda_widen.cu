#include "examples/moe_trainer/ops/cuda/kda_widen.hpp"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void kda_widen_array(const std::uint16_t* from, std::int64_t count, float* to) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < count) to[at] = __uint_as_float(std::uint32_t{from[at]} << 16);
}

// To nearest, ties to even; NaN stays NaN.
__global__ void kda_narrow_array(const float* from, std::int64_t count, std::uint16_t* to) {
  const std::int64_t at = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const std::uint32_t bits = __float_as_uint(from[at]);
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  to[at] =
      static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40U : (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace

In widened(OpCall& call, In array, std::int64_t count) {
  if (array.dtype() == Dtype::kF32 || !array) return array;
  auto* wide = call.scratch<float>(count);
  call.launch(kda_widen_array, grid_for(count, kThreads), array.as<std::uint16_t>(), count, wide);
  return wide;
}

Out widened(OpCall& call, Out array, std::int64_t count, std::vector<WidenedResult>& results) {
  if (array.dtype() == Dtype::kF32 || !array) return array;
  auto* wide = call.scratch<float>(count);
  results.push_back({array, wide, count});
  return wide;
}

void narrow(OpCall& call, const WidenedResult& result) {
  call.launch(kda_narrow_array, grid_for(result.count, kThreads), result.wide, result.count,
              result.narrow.as<std::uint16_t>());
}

}  // namespace terrace::trainer::cuda
