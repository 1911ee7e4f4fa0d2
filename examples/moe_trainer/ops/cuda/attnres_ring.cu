// The bf16 form of attention residuals for Hopper; formulas in attnres.cu.
//
// A persistent block takes every gridDim-th row. One warp fills a ring of stages, each one source's row, by
// bulk copies; the others take their packs of it into registers, which frees the stage, and add up the
// source's sums. So the ring keeps memory busy while the block reduces, weighs and mixes. Backward's row is
// d_h, the sources, and the old gradients that are added to; its part of d(w q) stays in shared memory until
// the last row.
#include <algorithm>
#include <type_traits>

#include "examples/moe_trainer/ops/cuda/attnres.hpp"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/mbarrier.cuh"
#include "examples/moe_trainer/ops/cuda/hopper/tma.cuh"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

using hopper::Barrier;

constexpr int kMostConsumers = 448;
constexpr int kMostThreads = kMostConsumers + kWarp;  // and the filling warp
constexpr int kMostWarps = kMostConsumers / kWarp;
constexpr int kMostStages = 32;
constexpr int kSlots = 16;  // of a reduction: one a source
constexpr int kPackNumbers = kPack<Bf16>;
constexpr int kConsumerBarrier = 1;

struct RingPlan {
  int consumers, stages;
  unsigned stage_bytes;
};
// Of backward's sources, a bit each: whose gradient is wanted, and which are added to.
struct Wanted {
  unsigned stored, added;
};
enum class Old : std::uint8_t { kNone, kSome };  // whether any is added to

template <int kKinds>
struct Control {
  Barrier full[kMostStages], empty[kMostStages];
  // By parity of the row, so that one barrier a row is enough.
  float partial[2][kMostWarps][kKinds][kSlots];
};

// Where a filler or a user of the ring stands.
struct Cursor {
  int stage = 0;
  unsigned parity = 0;
  __device__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1U;
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int kKinds>
__device__ void prepare(Control<kKinds>& control, const RingPlan& plan) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < plan.stages; ++stage) {
      control.full[stage].init(1);
      control.empty[stage].init_for_warps(static_cast<unsigned>(plan.consumers / kWarp));
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
}

// The filling thread: one row of one array into the next stage.
template <int kKinds>
__device__ void fill(Control<kKinds>& control, const RingPlan& plan, std::byte* ring, const void* row,
                     Cursor& at) {
  control.empty[at.stage].wait(at.parity ^ 1U);
  control.full[at.stage].arrive_expecting(plan.stage_bytes);
  hopper::load_bytes(ring + at.stage * plan.stage_bytes, row, plan.stage_bytes, &control.full[at.stage]);
  at.advance(plan.stages);
}

// A thread's packs of the next stage, which is given back.
template <int kPacks, int kKinds>
__device__ void take(Control<kKinds>& control, const RingPlan& plan, const std::byte* ring, int packs,
                     Cursor& at, uint4 (&to)[kPacks]) {
  control.full[at.stage].wait(at.parity);
  const std::byte* stage = ring + at.stage * plan.stage_bytes;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int index = static_cast<int>(threadIdx.x) + j * plan.consumers;
    to[j] = index < packs ? load_raw(stage + index * 16) : uint4{0, 0, 0, 0};
  }
  control.empty[at.stage].arrive_as_warp();
  at.advance(plan.stages);
}

// Sums over the warp of up to four numbers: lane 8 i has the sum of the i-th. Six shuffles.
__device__ float fold(float a, float b, float c, float d) {
  const bool upper = (threadIdx.x & 16U) != 0, odd = (threadIdx.x & 8U) != 0;
  float first = upper ? c : a, second = upper ? d : b;
  first += __shfl_xor_sync(kFullWarp, upper ? a : c, 16);
  second += __shfl_xor_sync(kFullWarp, upper ? b : d, 16);
  float mine = odd ? second : first;
  mine += __shfl_xor_sync(kFullWarp, odd ? first : second, 8);
  mine += __shfl_xor_sync(kFullWarp, mine, 4);
  mine += __shfl_xor_sync(kFullWarp, mine, 2);
  mine += __shfl_xor_sync(kFullWarp, mine, 1);
  return mine;
}
// A group of sixteen lanes; all get the result.
__device__ float sum_of_slots(float value) {
#pragma unroll
  for (int offset = kSlots / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullWarp, value, offset);
  return value;
}
__device__ float top_of_slots(float value) {
#pragma unroll
  for (int offset = kSlots / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// In lane l (and l + 16), of source l; zero where there is none.
struct Weighed {
  float p, a, b;
};
struct Scale {
  int sources;
  float width, eps;
};
// After the consumers' barrier: every warp adds up the warps' sums in order and weighs the sources.
template <int kKinds>
__device__ Weighed weigh(const float (&partial)[kMostWarps][kKinds][kSlots], int warps, const Scale& scale) {
  // The warp's halves take every second warp's sums each.
  const int slot = static_cast<int>(threadIdx.x) % kSlots;
  const int half = static_cast<int>(threadIdx.x) % kWarp / kSlots;
  float sums[kKinds] = {};
#pragma unroll
  for (int i = 0; i < kMostWarps / 2; ++i) {
    const int warp = 2 * i + half;
    if (warp >= warps) continue;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) sums[kind] += partial[warp][kind][slot];
  }
#pragma unroll
  for (int kind = 0; kind < kKinds; ++kind) sums[kind] += __shfl_xor_sync(kFullWarp, sums[kind], kSlots);
  const bool here = slot < scale.sources;
  const float r = here ? 1.0F / sqrtf(sums[0] / scale.width + scale.eps) : 0.0F;
  const float logit = here ? r * sums[1] : -INFINITY;
  const float e = expf(logit - top_of_slots(logit));
  Weighed weighed{};
  weighed.p = e / sum_of_slots(e);
  if constexpr (kKinds > 2) {
    const float along = here ? sums[2] : 0.0F;
    const float mean = sum_of_slots(weighed.p * along);
    weighed.a = weighed.p * (along - mean) * r;
    weighed.b = here ? -weighed.a * r * logit / scale.width : 0.0F;
  }
  return weighed;
}
__device__ float of_source(float value, int source) { return __shfl_sync(kFullWarp, value, source); }

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ int pack_index(int j, const RingPlan& plan) {
  return static_cast<int>(threadIdx.x) + j * plan.consumers;
}
__device__ float4 half_of(const uint4& raw, int half) {
  const unsigned first = half == 0 ? raw.x : raw.z, second = half == 0 ? raw.y : raw.w;
  return {low_half(first), high_half(first), low_half(second), high_half(second)};
}

// The filling thread's work.
__device__ void fill_all(const AttnRes& op, const RingPlan& plan, std::byte* ring, Control<2>& control) {
  Cursor at;
  for (std::int64_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
    for (int l = 0; l < op.sources; ++l) {
      fill(control, plan, ring, op.v[l].as<Bf16>() + row * op.width, at);
    }
  }
}
__device__ bool has(unsigned sources, int l) { return (sources >> l & 1U) != 0; }
__device__ void fill_all(const AttnResBackward& op, const RingPlan& plan, const Wanted& wanted,
                         std::byte* ring, Control<3>& control) {
  Cursor at;
  for (std::int64_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
    const std::int64_t first = row * op.width;
    fill(control, plan, ring, op.d_h.as<Bf16>() + first, at);
    for (int l = 0; l < op.sources; ++l) fill(control, plan, ring, op.v[l].as<Bf16>() + first, at);
    for (int l = 0; l < op.sources; ++l) {
      if (has(wanted.added, l)) fill(control, plan, ring, op.d_v[l].as<Bf16>() + first, at);
    }
  }
}

#endif

template <int kSources, int kPacks>
__global__ void __launch_bounds__(kMostThreads, 1)
    ring_forward(const __grid_constant__ AttnRes op, const RingPlan plan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ Control<2> control;
  prepare(control, plan);
  if (static_cast<int>(threadIdx.x) >= plan.consumers) {
    if (static_cast<int>(threadIdx.x) == plan.consumers) fill_all(op, plan, ring, control);
    return;
  }
  const int packs = static_cast<int>(op.width / kPackNumbers), sources = static_cast<int>(op.sources);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  float wq[kPacks][kPackNumbers] = {};
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int first = pack_index(j, plan) * kPackNumbers;
    if (first >= op.width) continue;
#pragma unroll
    for (int i = 0; i < kPackNumbers; ++i) wq[j][i] = op.w[first + i] * op.q[first + i];
  }
  const Scale scale{sources, static_cast<float>(op.width), op.eps};
  Cursor at;
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < op.rows; row += gridDim.x, turn ^= 1) {
    uint4 v[kSources][kPacks];
#pragma unroll
    for (int l = 0; l < kSources; ++l) {
      if (l >= sources) continue;
      take(control, plan, ring, packs, at, v[l]);
      float squares = 0.0F, along = 0.0F;
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        float x[kPackNumbers];
        unpack<Bf16>(v[l][j], x);
#pragma unroll
        for (int i = 0; i < kPackNumbers; ++i) {
          squares += x[i] * x[i];
          along += x[i] * wq[j][i];
        }
      }
      const float folded = fold(squares, along, 0.0F, 0.0F);
      if (lane == 0 || lane == 8) control.partial[turn][warp][lane / 8][l] = folded;
    }
    hopper::named_barrier_sync(kConsumerBarrier, plan.consumers);
    const Weighed weighed = weigh<2>(control.partial[turn], plan.consumers / kWarp, scale);
    float sum[kPacks][kPackNumbers] = {};
#pragma unroll
    for (int l = 0; l < kSources; ++l) {
      if (l >= sources) continue;
      const float p = of_source(weighed.p, l);
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        float x[kPackNumbers];
        unpack<Bf16>(v[l][j], x);
#pragma unroll
        for (int i = 0; i < kPackNumbers; ++i) sum[j][i] += p * x[i];
      }
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int first = pack_index(j, plan) * kPackNumbers;
      if (first < op.width) store_raw(op.h.as<Bf16>() + row * op.width + first, pack<Bf16>(sum[j]));
    }
    if (op.probability != nullptr && warp == 0 && lane < sources) {
      op.probability[row * sources + lane] = weighed.p;
    }
  }
#endif
}

// Shared memory behind the ring: w q, then the block's d(w q), each as two planes of four numbers a pack, so
// that a warp's 16-byte accesses meet no bank twice.
struct Planes {
  float4* wq;
  float4* d_wq;
  int packs;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ Planes prepare_planes(const AttnResBackward& op, const RingPlan& plan, std::byte* ring) {
  const int packs = static_cast<int>(op.width / kPackNumbers);
  auto* wq = reinterpret_cast<float4*>(ring + plan.stages * plan.stage_bytes);
  const Planes planes{wq, wq + 2 * packs, packs};
  for (int i = static_cast<int>(threadIdx.x); i < 2 * packs; i += static_cast<int>(blockDim.x)) {
    const int column = i % packs * kPackNumbers + i / packs * 4;
    wq[i] = {op.w[column] * op.q[column], op.w[column + 1] * op.q[column + 1],
             op.w[column + 2] * op.q[column + 2], op.w[column + 3] * op.q[column + 3]};
    planes.d_wq[i] = {0.0F, 0.0F, 0.0F, 0.0F};
  }
  return planes;
}

__device__ void add_dot(float& to, float4 a, float4 b) {
  to = fmaf(a.x, b.x, to);
  to = fmaf(a.y, b.y, to);
  to = fmaf(a.z, b.z, to);
  to = fmaf(a.w, b.w, to);
}
__device__ void add_scaled(float4& to, float factor, float4 x) {
  to.x = fmaf(factor, x.x, to.x);
  to.y = fmaf(factor, x.y, to.y);
  to.z = fmaf(factor, x.z, to.z);
  to.w = fmaf(factor, x.w, to.w);
}
__device__ float4 scaled(float factor, float4 x) {
  return {factor * x.x, factor * x.y, factor * x.z, factor * x.w};
}

// The warp's sums of one source, in lanes 0, 8 and 16. Past the row's end v and d_h are zeros, and any pack
// of w q will do.
template <int kPacks>
__device__ float source_sums(const uint4 (&v)[kPacks], const uint4 (&d_h)[kPacks], const Planes& planes,
                             const RingPlan& plan) {
  float squares[2] = {}, along_wq[2] = {}, along_d_h[2] = {};
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int index = min(pack_index(j, plan), planes.packs - 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = half_of(v[j], half);
      add_dot(squares[half], x, x);
      add_dot(along_wq[half], x, planes.wq[half * planes.packs + index]);
      add_dot(along_d_h[half], x, half_of(d_h[j], half));
    }
  }
  return fold(squares[0] + squares[1], along_wq[0] + along_wq[1], along_d_h[0] + along_d_h[1], 0.0F);
}

// From shared memory each time it is asked for: registers are short.
__device__ float4 load_again(const float4* at) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(hopper::shared_address(at)));
  return four;
}

// A row's d_v and its part of d(w q), from what the thread holds. `old`: the first stage of old gradients.
template <int kSources, int kPacks, Old kOld>
__device__ void mix_backward(const AttnResBackward& op, const RingPlan& plan, const Wanted& wanted,
                             const std::byte* ring, const Planes& planes, std::int64_t row,
                             const Weighed& weighed, int old, const uint4 (&v)[kSources][kPacks],
                             const uint4 (&d_h)[kPacks]) {
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int index = pack_index(j, plan);
    const bool inside = index < planes.packs;
    const int plane = inside ? index : 0;
    float4 sum[2] = {};
    if (inside) {
      sum[0] = planes.d_wq[index];
      sum[1] = planes.d_wq[planes.packs + index];
    }
    const float4 kept[2] = {planes.wq[plane], planes.wq[planes.packs + plane]};
    const float4 slope[2] = {half_of(d_h[j], 0), half_of(d_h[j], 1)};
#pragma unroll
    for (int l = 0; l < kSources; ++l) {
      if (l >= op.sources) continue;
      const float p = of_source(weighed.p, l), a = of_source(weighed.a, l), b = of_source(weighed.b, l);
      float4 u[2] = {kept[0], kept[1]};
      if constexpr (kOld == Old::kSome) {
        u[0] = load_again(planes.wq + plane);
        u[1] = load_again(planes.wq + planes.packs + plane);
      }
      float4 d[2] = {scaled(p, slope[0]), scaled(p, slope[1])};
      if constexpr (kOld == Old::kSome) {
        if (has(wanted.added, l)) {
          int stage = old + __popc(wanted.added & ((1U << l) - 1U));
          if (stage >= plan.stages) stage -= plan.stages;
          const uint4 before = load_raw(ring + stage * plan.stage_bytes + plane * 16);
          add_scaled(d[0], 1.0F, half_of(before, 0));
          add_scaled(d[1], 1.0F, half_of(before, 1));
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = half_of(v[l][j], half);
        add_scaled(sum[half], a, x);
        add_scaled(d[half], a, u[half]);
        add_scaled(d[half], b, x);
      }
      if (inside && has(wanted.stored, l)) {
        store_raw(op.d_v[l].as<Bf16>() + row * op.width + index * kPackNumbers,
                  {as_pair(d[0].x, d[0].y), as_pair(d[0].z, d[0].w), as_pair(d[1].x, d[1].y),
                   as_pair(d[1].z, d[1].w)});
      }
    }
    if (!inside) continue;
    planes.d_wq[index] = sum[0];
    planes.d_wq[planes.packs + index] = sum[1];
  }
}

#endif

template <int kSources, int kPacks, Old kOld>
__global__ void __launch_bounds__(kMostThreads, 1)
    ring_backward(const __grid_constant__ AttnResBackward op, const RingPlan plan, const Wanted wanted,
                  float* parts) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ Control<3> control;
  const Planes planes = prepare_planes(op, plan, ring);
  prepare(control, plan);
  if (static_cast<int>(threadIdx.x) >= plan.consumers) {
    if (static_cast<int>(threadIdx.x) == plan.consumers) fill_all(op, plan, wanted, ring, control);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const Scale scale{static_cast<int>(op.sources), static_cast<float>(op.width), op.eps};
  Cursor at;
  int turn = 0;
  for (std::int64_t row = blockIdx.x; row < op.rows; row += gridDim.x, turn ^= 1) {
    uint4 v[kSources][kPacks], d_h[kPacks];
    take(control, plan, ring, planes.packs, at, d_h);
#pragma unroll
    for (int l = 0; l < kSources; ++l) {
      if (l >= op.sources) continue;
      take(control, plan, ring, planes.packs, at, v[l]);
      const float folded = source_sums(v[l], d_h, planes, plan);
      if (lane % 8 == 0 && lane < 24) control.partial[turn][warp][lane / 8][l] = folded;
    }
    hopper::named_barrier_sync(kConsumerBarrier, plan.consumers);
    const Weighed weighed = weigh<3>(control.partial[turn], plan.consumers / kWarp, scale);
    // The old gradients lie in the next stages, in the order of their sources.
    const Cursor old = at;
    if constexpr (kOld == Old::kSome) {
      for (int count = __popc(wanted.added); count > 0; --count) {
        control.full[at.stage].wait(at.parity);
        at.advance(plan.stages);
      }
    }
    mix_backward<kSources, kPacks, kOld>(op, plan, wanted, ring, planes, row, weighed, old.stage, v, d_h);
    if constexpr (kOld == Old::kSome) {
      for (Cursor done = old; done.stage != at.stage || done.parity != at.parity; done.advance(plan.stages)) {
        control.empty[done.stage].arrive_as_warp();
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int index = pack_index(j, plan);
    if (index >= planes.packs) continue;
    auto* to = reinterpret_cast<float4*>(parts + std::int64_t{blockIdx.x} * op.width + index * kPackNumbers);
    to[0] = planes.d_wq[index];
    to[1] = planes.d_wq[planes.packs + index];
  }
#endif
}

int attribute(OpCall& call, cudaDeviceAttr which) {
  int device = 0, value = 0;
  call.check(cudaGetDevice(&device), "cudaGetDevice");
  call.check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

// What shape of ring serves `width`, beside `beside` bytes of shared memory for other things; no consumers:
// none.
struct RingNeed {
  std::int64_t width;
  int items, held;  // stages that a row passes through, and that it holds at once
  std::size_t beside;
};
RingPlan plan_ring(const RingNeed& need) {
  constexpr std::size_t kShared = 220 * 1024;  // of 227, less the barriers and partial sums
  const std::int64_t packs = need.width / kPackNumbers;
  if (need.width % kPackNumbers != 0 || packs > 2 * kMostConsumers) return {};
  const std::int64_t each = packs <= kMostConsumers ? 1 : 2;
  const auto bytes = static_cast<std::size_t>(need.width) * 2;
  // Two rows under way are enough; small ones leave room for other blocks of the multiprocessor.
  const auto stages = std::min<std::size_t>(
      {static_cast<std::size_t>(2 * need.items), std::size_t{kMostStages}, (kShared - need.beside) / bytes});
  if (stages < static_cast<std::size_t>(std::max(2, need.held + 1))) return {};
  return {static_cast<int>(ceil_div(ceil_div(packs, each), kWarp) * kWarp), static_cast<int>(stages),
          static_cast<unsigned>(bytes)};
}

// Enough blocks to fill the device, each of many rows.
template <typename... Parameters>
Grid ring_grid(OpCall& call, void (*kernel)(Parameters...), const RingPlan& plan, std::size_t beside,
               std::int64_t rows) {
  Grid grid{.threads = plan.consumers + kWarp,
            .shared_bytes = static_cast<std::size_t>(plan.stages) * plan.stage_bytes + beside};
  int blocks = 0;
  call.check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(grid.shared_bytes)),
      "cudaFuncSetAttribute");
  call.check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, grid.threads, grid.shared_bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  grid.x = std::min<std::int64_t>(
      rows, std::int64_t{std::max(blocks, 1)} * attribute(call, cudaDevAttrMultiProcessorCount));
  return grid;
}

template <typename Op>
bool suits(OpCall& call, const Op& op, Dtype dtype) {
  if (dtype != Dtype::kBf16 || attribute(call, cudaDevAttrComputeCapabilityMajor) < 9) return false;
  for (std::size_t l = 0; l < static_cast<std::size_t>(op.sources); ++l) {
    if (!aligned(op.v[l].at())) return false;
  }
  return true;
}

// body(kernel's bound on the sources, its packs a thread) as integral constants; false where there is none.
template <typename Body>
bool with_bounds(std::int64_t sources, std::int64_t packs, Body&& body) {
  const auto take = [&](auto bound, auto each) { return body(bound, each), true; };
  if (packs <= kMostConsumers) {
    const std::integral_constant<int, 1> one{};
    if (sources <= 4) return take(std::integral_constant<int, 4>{}, one);
    if (sources <= 9) return take(std::integral_constant<int, 9>{}, one);
    return take(std::integral_constant<int, kSlots>{}, one);
  }
  const std::integral_constant<int, 2> two{};
  if (sources <= 4) return take(std::integral_constant<int, 4>{}, two);
  if (sources <= 9) return take(std::integral_constant<int, 9>{}, two);
  return false;
}

}  // namespace

bool launch_attnres_ring(OpCall& call, const AttnRes& op) {
  if (!suits(call, op, op.h.dtype()) || !aligned(op.h.at())) return false;
  const RingPlan plan =
      plan_ring({.width = op.width, .items = static_cast<int>(op.sources), .held = 0, .beside = 0});
  if (plan.consumers == 0) return false;
  return with_bounds(op.sources, op.width / kPackNumbers, [&](auto sources, auto packs) {
    const auto kernel = ring_forward<decltype(sources)::value, decltype(packs)::value>;
    call.launch(kernel, ring_grid(call, kernel, plan, 0, op.rows), op, plan);
  });
}

bool launch_attnres_ring(OpCall& call, const AttnResBackward& op, AttnResParts* parts) {
  if (!suits(call, op, op.d_h.dtype()) || !aligned(op.d_h.at())) return false;
  int added = 0;
  Wanted wanted{};
  for (std::size_t l = 0; l < static_cast<std::size_t>(op.sources); ++l) {
    if (!aligned(op.d_v[l].at())) return false;
    if (!op.d_v[l]) continue;
    wanted.stored |= 1U << l;
    if (op.into_d_v[l] != Accumulate::kAdd) continue;
    wanted.added |= 1U << l;
    ++added;
  }
  const std::size_t beside = static_cast<std::size_t>(op.width) * 2 * sizeof(float);
  const RingPlan plan = plan_ring({.width = op.width,
                                   .items = static_cast<int>(op.sources) + 1 + added,
                                   .held = added,
                                   .beside = beside});
  if (plan.consumers == 0) return false;
  return with_bounds(op.sources, op.width / kPackNumbers, [&](auto sources, auto packs) {
    constexpr int kSources = decltype(sources)::value, kPacks = decltype(packs)::value;
    const auto kernel = added == 0 ? ring_backward<kSources, kPacks, Old::kNone>
                                   : ring_backward<kSources, kPacks, Old::kSome>;
    const Grid grid = ring_grid(call, kernel, plan, beside, op.rows);
    parts->slices = grid.x;
    parts->partial = call.scratch<float>(grid.x * op.width);
    call.launch(kernel, grid, op, plan, wanted, parts->partial);
  });
}

}  // namespace terrace::trainer::cuda
