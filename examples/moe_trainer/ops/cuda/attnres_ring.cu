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

__device__ void copy_row(void* stage, const void* row, unsigned bytes, Barrier* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          hopper::shared_address(stage)),
      "l"(row), "r"(bytes), "r"(hopper::shared_address(&full->state))
      : "memory");
}

template <int kKinds>
__device__ void prepare(Control<kKinds>& control, const RingPlan& plan) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < plan.stages; ++stage) {
      control.full[stage].init(1);
      control.empty[stage].init(static_cast<unsigned>(plan.consumers / kWarp));
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
  copy_row(ring + at.stage * plan.stage_bytes, row, plan.stage_bytes, &control.full[at.stage]);
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
  __syncwarp();
  if (threadIdx.x % kWarp == 0) control.empty[at.stage].arrive();
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
  const int slot = static_cast<int>(threadIdx.x) % kSlots;
  float sums[kKinds] = {};
  for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) sums[kind] += partial[warp][kind][slot];
  }
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
__device__ bool adds(const AttnResBackward& op, int l) {
  return op.d_v[l].at() != nullptr && op.into_d_v[l] == Accumulate::kAdd;
}
__device__ void fill_all(const AttnResBackward& op, const RingPlan& plan, std::byte* ring,
                         Control<3>& control) {
  Cursor at;
  for (std::int64_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
    const std::int64_t first = row * op.width;
    fill(control, plan, ring, op.d_h.as<Bf16>() + first, at);
    for (int l = 0; l < op.sources; ++l) fill(control, plan, ring, op.v[l].as<Bf16>() + first, at);
    for (int l = 0; l < op.sources; ++l) {
      if (adds(op, l)) fill(control, plan, ring, op.d_v[l].as<Bf16>() + first, at);
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

__device__ float dot(float4 a, float4 b) { return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w); }
__device__ void add_scaled(float4& to, float factor, float4 x) {
  to.x += factor * x.x;
  to.y += factor * x.y;
  to.z += factor * x.z;
  to.w += factor * x.w;
}

// The warp's sums of one source, in lanes 0, 8 and 16.
template <int kPacks>
__device__ float source_sums(const uint4 (&v)[kPacks], const uint4 (&d_h)[kPacks], const Planes& planes,
                             const RingPlan& plan) {
  float squares = 0.0F, along_wq = 0.0F, along_d_h = 0.0F;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int index = pack_index(j, plan);
    if (index >= planes.packs) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 x = half_of(v[j], half);
      squares += dot(x, x);
      along_wq += dot(x, planes.wq[half * planes.packs + index]);
      along_d_h += dot(x, half_of(d_h[j], half));
    }
  }
  return fold(squares, along_wq, along_d_h, 0.0F);
}

// d_v of pack j of one source; old: the stage with what is added to, or null.
struct SourceFactors {
  float p, a, b;
};
__device__ uint4 source_gradient(const uint4& v, const uint4& d_h, const SourceFactors& by,
                                 const float4 (&u)[2], const std::byte* old, float4 (&sum)[2]) {
  unsigned out[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 x = half_of(v, half);
    add_scaled(sum[half], by.a, x);
    float4 d{0.0F, 0.0F, 0.0F, 0.0F};
    if (old != nullptr) d = half_of(load_raw(old), half);
    add_scaled(d, by.p, half_of(d_h, half));
    add_scaled(d, by.a, u[half]);
    add_scaled(d, by.b, x);
    out[2 * half] = as_pair(d.x, d.y);
    out[2 * half + 1] = as_pair(d.z, d.w);
  }
  return {out[0], out[1], out[2], out[3]};
}

// A row's d_v and its part of d(w q), from what the thread holds. `old` is the first stage of old gradients.
template <int kSources, int kPacks>
__device__ void mix_backward(const AttnResBackward& op, const RingPlan& plan, const std::byte* ring,
                             const Planes& planes, std::int64_t row, const Weighed& weighed,
                             const Cursor& old, const uint4 (&v)[kSources][kPacks],
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
    Cursor next = old;
#pragma unroll
    for (int l = 0; l < kSources; ++l) {
      if (l >= op.sources) continue;
      const SourceFactors by{of_source(weighed.p, l), of_source(weighed.a, l), of_source(weighed.b, l)};
      const float4 u[2] = {planes.wq[plane], planes.wq[planes.packs + plane]};
      const std::byte* before = nullptr;
      if (adds(op, l)) {
        before = ring + next.stage * plan.stage_bytes + plane * 16;
        next.advance(plan.stages);
      }
      const uint4 d = source_gradient(v[l][j], d_h[j], by, u, before, sum);
      if (inside && op.d_v[l].at() != nullptr) {
        store_raw(op.d_v[l].as<Bf16>() + row * op.width + index * kPackNumbers, d);
      }
    }
    if (!inside) continue;
    planes.d_wq[index] = sum[0];
    planes.d_wq[planes.packs + index] = sum[1];
  }
}

#endif

template <int kSources, int kPacks>
__global__ void __launch_bounds__(kMostThreads, 1)
    ring_backward(const __grid_constant__ AttnResBackward op, const RingPlan plan, float* parts) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ Control<3> control;
  const Planes planes = prepare_planes(op, plan, ring);
  prepare(control, plan);
  if (static_cast<int>(threadIdx.x) >= plan.consumers) {
    if (static_cast<int>(threadIdx.x) == plan.consumers) fill_all(op, plan, ring, control);
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
    for (int l = 0; l < op.sources; ++l) {
      if (!adds(op, l)) continue;
      control.full[at.stage].wait(at.parity);
      at.advance(plan.stages);
    }
    mix_backward(op, plan, ring, planes, row, weighed, old, v, d_h);
    __syncwarp();
    for (Cursor done = old; done.stage != at.stage || done.parity != at.parity; done.advance(plan.stages)) {
      if (lane == 0) control.empty[done.stage].arrive();
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
template <typename... Parameters, typename... Arguments>
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
  for (std::size_t l = 0; l < static_cast<std::size_t>(op.sources); ++l) {
    if (!aligned(op.d_v[l].at())) return false;
    added += static_cast<int>(op.d_v[l] && op.into_d_v[l] == Accumulate::kAdd);
  }
  const std::size_t beside = static_cast<std::size_t>(op.width) * 2 * sizeof(float);
  const RingPlan plan = plan_ring({.width = op.width,
                                   .items = static_cast<int>(op.sources) + 1 + added,
                                   .held = added,
                                   .beside = beside});
  if (plan.consumers == 0) return false;
  return with_bounds(op.sources, op.width / kPackNumbers, [&](auto sources, auto packs) {
    const auto kernel = ring_backward<decltype(sources)::value, decltype(packs)::value>;
    const Grid grid = ring_grid(call, kernel, plan, beside, op.rows);
    parts->slices = grid.x;
    parts->partial = call.scratch<float>(grid.x * op.width);
    call.launch(kernel, grid, op, plan, parts->partial);
  });
}

}  // namespace terrace::trainer::cuda
