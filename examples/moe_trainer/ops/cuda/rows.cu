// Dispatch and combine of expert rows, as gathers: no atomics.
//   gather    out_r = x[source_r / k], zeros where source_r < 0         x: (T, D)   out: (rows, D)
//   sum       out_t [+]= sum over j of weight_tj x[row_tj]              x: (rows, D)   out: (T, D)   weight,
//   row: (T, k) backward  d_x[row_tj] = weight_tj d_out_t,  d_weight_tj = <d_out_t, x[row_tj]>
// A row of -1 is left out. A thread takes a pack of 16 bytes where they divide the rows, else one number.
//
// A gather reads a row of x k times, far apart. So that it comes from memory once, all rows are made a slab
// of columns after the other: x's part of a slab stays in the second-level cache, and what is written passes
// it by.
#include <algorithm>
#include <type_traits>

#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kAtOnce = 4;                                  // packs whose loads are under way together
constexpr int kRowsAtOnce = 8;                              // of a sum
constexpr int kGatheredRows = 4;                            // of a warp
constexpr int kGatheredPacks = 2;                           // of a lane and row, at once
constexpr std::int64_t kSlabBytes = std::int64_t{8} << 20;  // of x

// kPack numbers of T at a time, or one.
template <typename T, int kAtATime>
struct Numbers {
  using Element = T;
  static constexpr int kCount = kAtATime;
  using Raw = std::conditional_t<kCount == 1, T, uint4>;
  float value[kCount];
  // What is read once, and what is not read again soon.
  static __device__ Raw stream(const T* at) {
    if constexpr (kCount == 1) {
      return *at;
    } else {
      return stream_raw(at);
    }
  }
  static __device__ Raw read(const T* at) { return *reinterpret_cast<const Raw*>(at); }
  static __device__ void stream_out(T* at, const Raw& raw) {
    if constexpr (kCount == 1) {
      *at = raw;
    } else {
      __stcs(reinterpret_cast<uint4*>(at), raw);
    }
  }
  __device__ void add(float weight, const Raw& raw) {
    if constexpr (kCount == 1) {
      value[0] += weight * load_float(&raw);
    } else {
      float x[kCount];
      unpack<T>(raw, x);
#pragma unroll
      for (int n = 0; n < kCount; ++n) value[n] += weight * x[n];
    }
  }
  __device__ void load(const T* at) {
    if constexpr (kCount == 1) {
      value[0] = load_float(at);
    } else {
      unpack<T>(load_raw(at), value);
    }
  }
  __device__ void store(T* at) const {
    if constexpr (kCount == 1) {
      store_float(at, value[0]);
    } else {
      store_raw(at, pack<T>(value));
    }
  }
};

// row_blocks blocks make all rows of a slab of `slab` numbers, the next ones those of the next.
struct Slabs {
  std::int64_t slab;
  unsigned row_blocks;
};
template <typename Each>
[[nodiscard]] Slabs slabs_of(const GatherRows& op) {
  constexpr std::int64_t kUnit = std::int64_t{kGatheredPacks} * kWarp * Each::kCount;
  const std::int64_t tokens = ceil_div(op.rows, std::max<std::int64_t>(op.top_k, 1));  // about
  const auto bytes = tokens * op.width * static_cast<std::int64_t>(sizeof(typename Each::Element));
  const std::int64_t slabs = std::max<std::int64_t>(1, ceil_div(bytes, kSlabBytes));
  return {ceil_div(ceil_div(op.width, slabs), kUnit) * kUnit,
          static_cast<unsigned>(ceil_div(op.rows, std::int64_t{kGatheredRows} * kWarps))};
}

template <typename Each>
__global__ void __launch_bounds__(kThreads) gather_rows(GatherRows op, Slabs slabs) {
  using T = typename Each::Element;
  using Raw = typename Each::Raw;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const unsigned slab = blockIdx.x / slabs.row_blocks, row_block = blockIdx.x % slabs.row_blocks;
  const std::int64_t row0 = (std::int64_t{row_block} * kWarps + threadIdx.x / kWarp) * kGatheredRows;
  const std::int64_t end = min(op.width, (slab + 1) * slabs.slab);
  // Lane r: the token that row r comes from.
  const std::int32_t source = lane < kGatheredRows && row0 + lane < op.rows ? op.source[row0 + lane] : -1;
  const int own =
      source < 0 ? -1 : static_cast<int>(static_cast<unsigned>(source) / static_cast<unsigned>(op.top_k));
  int token[kGatheredRows];
#pragma unroll
  for (int r = 0; r < kGatheredRows; ++r) token[r] = __shfl_sync(kFullWarp, own, r);
  for (std::int64_t c0 = slab * slabs.slab + lane * Each::kCount; c0 < end;
       c0 += kGatheredPacks * kWarp * Each::kCount) {
    Raw raw[kGatheredRows][kGatheredPacks];
#pragma unroll
    for (int r = 0; r < kGatheredRows; ++r) {
#pragma unroll
      for (int i = 0; i < kGatheredPacks; ++i) {
        const std::int64_t c = c0 + i * kWarp * Each::kCount;
        raw[r][i] = Raw{};
        if (token[r] >= 0 && c < end) {
          raw[r][i] = Each::read(op.x.as<T>() + std::int64_t{token[r]} * op.width + c);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kGatheredRows; ++r) {
#pragma unroll
      for (int i = 0; i < kGatheredPacks; ++i) {
        const std::int64_t c = c0 + i * kWarp * Each::kCount;
        if (row0 + r < op.rows && c < end) {
          Each::stream_out(op.out.as<T>() + (row0 + r) * op.width + c, raw[r][i]);
        }
      }
    }
  }
}

// A warp takes one pack a lane of a token; a block eight tokens, `chunks` blocks their whole width.
template <typename Each>
__global__ void __launch_bounds__(kThreads, 4) sum_rows(SumRows op, unsigned chunks) {
  using T = typename Each::Element;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t token = std::int64_t{blockIdx.x / chunks} * kWarps + threadIdx.x / kWarp;
  const std::int64_t column = (std::int64_t{blockIdx.x % chunks} * kWarp + lane) * Each::kCount;
  if (token >= op.tokens) return;
  const bool inside = column < op.width;
  T* out = op.out.as<T>() + token * op.width + column;
  Each sum{};
  if (inside && op.into == Accumulate::kAdd) sum.load(out);
  for (std::int64_t j0 = 0; j0 < op.top_k; j0 += kRowsAtOnce) {
    // Lane i: the i-th row of these and its weight.
    std::int32_t own = -1;
    float own_weight = 0.0F;
    if (lane < kRowsAtOnce && j0 + lane < op.top_k) {
      const std::int64_t slot = token * op.top_k + j0 + lane;
      own = op.row[slot];
      if (own >= 0) own_weight = op.weight == nullptr ? 1.0F : op.weight[slot];
    }
    typename Each::Raw x[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const std::int32_t row = __shfl_sync(kFullWarp, own, i);
      x[i] = {};
      if (row >= 0 && inside) x[i] = Each::stream(op.x.as<T>() + std::int64_t{row} * op.width + column);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      sum.add(__shfl_sync(kFullWarp, own_weight, i), x[i]);
    }
  }
  if (inside) sum.store(out);
}

// One warp a slot (t, j); a token's slots are neighbours, so its d_out comes from memory once.
template <typename Each>
__global__ void sum_rows_backward(SumRowsBackward op) {
  using T = typename Each::Element;
  const std::int64_t slot = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (slot >= op.tokens * op.top_k) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int32_t row = op.row[slot];
  if (row < 0) {
    if (lane == 0 && op.d_weight != nullptr) op.d_weight[slot] = 0.0F;
    return;
  }
  const std::int64_t row0 = std::int64_t{row} * op.width;
  const T* d_out = op.d_out.as<T>() + slot / op.top_k * op.width;
  const float weight = op.weight == nullptr ? 1.0F : op.weight[slot];
  float product = 0.0F;
  for (std::int64_t c0 = lane * Each::kCount; c0 < op.width; c0 += kAtOnce * kWarp * Each::kCount) {
    Each d[kAtOnce], x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t c = c0 + i * kWarp * Each::kCount;
      d[i] = x[i] = {};
      if (c >= op.width) continue;
      d[i].load(d_out + c);
      if (op.d_weight != nullptr) x[i].load(op.x.as<T>() + row0 + c);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t c = c0 + i * kWarp * Each::kCount;
      if (c >= op.width) continue;
#pragma unroll
      for (int n = 0; n < Each::kCount; ++n) {
        product += d[i].value[n] * x[i].value[n];
        d[i].value[n] *= weight;
      }
      if (op.d_x.at() != nullptr) d[i].store(op.d_x.as<T>() + row0 + c);
    }
  }
  if (op.d_weight == nullptr) return;
  const float d_weight = warp_sum(product);
  if (lane == 0) op.d_weight[slot] = d_weight;
}

// body(Numbers) of the type, sixteen bytes at a time where `sixteens`.
struct RowsAre {
  Dtype dtype;
  std::int64_t width;
  bool aligned;
};
template <typename Body>
void with_numbers(const RowsAre& rows, Body&& body) {
  with_element(rows.dtype, [&](auto element_type) {
    using T = decltype(element_type);
    if (rows.aligned && rows.width % kPack<T> == 0) return body(Numbers<T, kPack<T>>{});
    body(Numbers<T, 1>{});
  });
}

}  // namespace

void launch(OpCall& call, const GatherRows& op) {
  call.set_shape({op.rows, op.width, op.top_k});
  call.require(op.x.dtype() == op.out.dtype(), "all arrays must have one type");
  if (op.width <= 0) return;
  with_numbers({op.x.dtype(), op.width, aligned(op.x.at()) && aligned(op.out.at())}, [&](auto numbers) {
    using Each = decltype(numbers);
    const Slabs slabs = slabs_of<Each>(op);
    call.launch(gather_rows<Each>,
                Grid{.x = slabs.row_blocks * ceil_div(op.width, slabs.slab), .threads = kThreads}, op, slabs);
  });
}

void launch(OpCall& call, const SumRows& op) {
  call.set_shape({op.tokens, op.width, op.top_k});
  call.require(op.x.dtype() == op.out.dtype(), "all arrays must have one type");
  if (op.width <= 0) return;
  with_numbers({op.x.dtype(), op.width, aligned(op.x.at()) && aligned(op.out.at())}, [&](auto numbers) {
    using Each = decltype(numbers);
    const std::int64_t chunks = ceil_div(op.width, std::int64_t{kWarp} * Each::kCount);
    call.launch(sum_rows<Each>, Grid{.x = ceil_div(op.tokens, kWarps) * chunks, .threads = kThreads}, op,
                static_cast<unsigned>(chunks));
  });
}

void launch(OpCall& call, const SumRowsBackward& op) {
  call.set_shape({op.tokens, op.width, op.top_k});
  const Dtype dtype = op.d_out.dtype();
  call.require((!op.x || op.x.dtype() == dtype) && (!op.d_x || op.d_x.dtype() == dtype),
               "all arrays must have one type");
  const bool sixteens = aligned(op.x.at()) && aligned(op.d_out.at()) && aligned(op.d_x.at());
  with_numbers({dtype, op.width, sixteens}, [&](auto numbers) {
    call.launch(sum_rows_backward<decltype(numbers)>,
                Grid{.x = ceil_div(op.tokens * op.top_k, kWarps), .threads = kThreads}, op);
  });
}

}  // namespace terrace::trainer::cuda
