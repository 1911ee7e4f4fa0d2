// Dispatch and combine of expert rows, as gathers: no atomics.
//   gather    out_r = x[source_r / k], zeros where source_r < 0         x: (T, D)   out: (rows, D)
//   sum       out_t [+]= sum over j of weight_tj x[row_tj]              x: (rows, D)   out: (T, D)   weight,
//   row: (T, k) backward  d_x[row_tj] = weight_tj d_out_t,  d_weight_tj = <d_out_t, x[row_tj]>
// A row of -1 is left out. A thread takes a pack of 16 bytes where they divide the rows, else one number.
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSlotsPerBlock = kThreads / kWarp;
constexpr int kAtOnce = 4;  // rows or packs whose loads are under way together

// kPack numbers of T at a time, or one.
template <typename T, int kAtATime>
struct Numbers {
  using Element = T;
  static constexpr int kCount = kAtATime;
  float value[kCount];
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

__device__ std::int64_t element() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }

template <typename Each>
__global__ void gather_rows(GatherRows op) {
  using T = typename Each::Element;
  const std::int64_t packs = op.width / Each::kCount, at = element(), row = at / packs;
  if (row >= op.rows) return;
  const std::int64_t column = at % packs * Each::kCount;
  const std::int32_t source = op.source[row];
  Each numbers{};
  if (source >= 0) numbers.load(op.x.as<T>() + source / op.top_k * op.width + column);
  numbers.store(op.out.as<T>() + row * op.width + column);
}

template <typename Each>
__global__ void sum_rows(SumRows op) {
  using T = typename Each::Element;
  const std::int64_t packs = op.width / Each::kCount, at = element(), token = at / packs;
  if (token >= op.tokens) return;
  const std::int64_t column = at % packs * Each::kCount, slot0 = token * op.top_k;
  Each sum{};
  T* out = op.out.as<T>() + token * op.width + column;
  if (op.into == Accumulate::kAdd) sum.load(out);
  for (std::int64_t j0 = 0; j0 < op.top_k; j0 += kAtOnce) {
    Each x[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int64_t slot = slot0 + j0 + i;
      const std::int32_t row = j0 + i < op.top_k ? op.row[slot] : -1;
      x[i] = {};
      weight[i] = 0.0F;
      if (row < 0) continue;
      x[i].load(op.x.as<T>() + std::int64_t{row} * op.width + column);
      weight[i] = op.weight == nullptr ? 1.0F : op.weight[slot];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int n = 0; n < Each::kCount; ++n) sum.value[n] += weight[i] * x[i].value[n];
    }
  }
  sum.store(out);
}

// One warp a slot (t, j); a token's slots are neighbours, so its d_out comes from memory once.
template <typename Each>
__global__ void sum_rows_backward(SumRowsBackward op) {
  using T = typename Each::Element;
  const std::int64_t slot = std::int64_t{blockIdx.x} * kSlotsPerBlock + threadIdx.x / kWarp;
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
    call.launch(gather_rows<Each>, grid_for(op.rows * (op.width / Each::kCount), kThreads), op);
  });
}

void launch(OpCall& call, const SumRows& op) {
  call.set_shape({op.tokens, op.width, op.top_k});
  call.require(op.x.dtype() == op.out.dtype(), "all arrays must have one type");
  if (op.width <= 0) return;
  with_numbers({op.x.dtype(), op.width, aligned(op.x.at()) && aligned(op.out.at())}, [&](auto numbers) {
    using Each = decltype(numbers);
    call.launch(sum_rows<Each>, grid_for(op.tokens * (op.width / Each::kCount), kThreads), op);
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
                Grid{.x = ceil_div(op.tokens * op.top_k, kSlotsPerBlock), .threads = kThreads}, op);
  });
}

}  // namespace terrace::trainer::cuda
