// y = o r w s,  r = (mean o^2 + eps)^-1/2,  s = sigmoid(gate)      o, gate, y: (rows, width)   w: (width)
// g = d_y w s:  d_o = r (g - o r^2 mean(g o)),  d_gate = d_y o r w s (1 - s),  d_w = sum over rows of d_y o r
// s A row is one head of one token. Rows in registers where 16 bytes divide them; else one warp a row.
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/row_group.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

template <typename Group>
__global__ void __launch_bounds__(Group::kBlock) gated_forward(GatedRmsNorm op) {
  using T = typename Group::Element;
  constexpr int kNumbers = Group::kNumbers;
  const std::int64_t row = std::int64_t{blockIdx.x} * Group::kRows + Group::row_in_block();
  const bool live = row < op.rows;
  const std::int64_t first = row * op.width;
  uint4 o[Group::kPacks], gate[Group::kPacks];
  load_row<Group>(op.o.as<T>() + first, op.width, live, o);
  load_row<Group>(op.gate.as<T>() + first, op.width, live, gate);
  float squares[1] = {};
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    float a[kNumbers];
    unpack<T>(o[i], a);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) squares[0] += a[n] * a[n];
  }
  group_sums<Group>(squares);
  const float r = 1.0F / sqrtf(squares[0] / static_cast<float>(op.width) + op.eps);
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    const int column = Group::column(i);
    if (!live || column >= op.width) continue;
    float a[kNumbers], z[kNumbers], w[kNumbers];
    unpack<T>(o[i], a);
    unpack<T>(gate[i], z);
    load_shared_row(op.w + column, w);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) a[n] = a[n] * r * w[n] * fast_sigmoid(z[n]);
    store_raw(op.y.as<T>() + first + column, pack<T>(a));
  }
}

// partial: (blocks, width), the blocks' parts of d_w; null: not wanted.
template <typename Group>
__global__ void __launch_bounds__(Group::kBlock) gated_backward(GatedRmsNormBackward op, float* partial) {
  using T = typename Group::Element;
  constexpr int kNumbers = Group::kNumbers;
  float d_w[Group::kPacks][kNumbers] = {};
  for (std::int64_t base = std::int64_t{blockIdx.x} * Group::kRows; base < op.rows;
       base += std::int64_t{gridDim.x} * Group::kRows) {
    const std::int64_t row = base + Group::row_in_block(), first = row * op.width;
    const bool live = row < op.rows;
    uint4 o[Group::kPacks], gate[Group::kPacks], d_y[Group::kPacks];
    load_row<Group>(op.o.as<T>() + first, op.width, live, o);
    load_row<Group>(op.gate.as<T>() + first, op.width, live, gate);
    load_row<Group>(op.d_y.as<T>() + first, op.width, live, d_y);
    float sums[2] = {};  // o^2, g o
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) {
      const int column = Group::column(i);
      if (column >= op.width) continue;
      float a[kNumbers], z[kNumbers], dy[kNumbers], w[kNumbers];
      unpack<T>(o[i], a);
      unpack<T>(gate[i], z);
      unpack<T>(d_y[i], dy);
      load_shared_row(op.w + column, w);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        sums[0] += a[n] * a[n];
        sums[1] += dy[n] * w[n] * fast_sigmoid(z[n]) * a[n];
      }
    }
    group_sums<Group>(sums);
    const float r = 1.0F / sqrtf(sums[0] / static_cast<float>(op.width) + op.eps);
    const float pull = sums[1] / static_cast<float>(op.width) * r * r;
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) {
      const int column = Group::column(i);
      if (!live || column >= op.width) continue;
      float a[kNumbers], z[kNumbers], dy[kNumbers], w[kNumbers];
      unpack<T>(o[i], a);
      unpack<T>(gate[i], z);
      unpack<T>(d_y[i], dy);
      load_shared_row(op.w + column, w);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        const float s = fast_sigmoid(z[n]), normal = a[n] * r;
        d_w[i][n] += dy[n] * s * normal;
        z[n] = dy[n] * w[n] * normal * s * (1.0F - s);
        a[n] = r * (dy[n] * w[n] * s - a[n] * pull);
      }
      store_raw(op.d_o.as<T>() + first + column, pack<T>(a));
      store_raw(op.d_gate.as<T>() + first + column, pack<T>(z));
    }
  }
  if (partial != nullptr) store_column_parts<Group>(d_w, op.width, partial);
}

template <typename T>
__device__ float inverse_rms(const T* o, std::int64_t width, float eps) {
  float squares = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) {
    squares += load_float(o + c) * load_float(o + c);
  }
  return 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
}

template <typename T>
__global__ void any_forward(GatedRmsNorm op) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const std::int64_t base = row * op.width;
  const T* o = op.o.as<T>() + base;
  const float r = inverse_rms(o, op.width, op.eps);
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float open = fast_sigmoid(load_float(op.gate.as<T>() + base + c));
    store_float(op.y.as<T>() + base + c, load_float(o + c) * r * op.w[c] * open);
  }
}

template <typename T>
__global__ void any_backward(GatedRmsNormBackward op, float* inverse) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const std::int64_t base = row * op.width;
  const T* values = op.o.as<T>() + base;
  const T* gates = op.gate.as<T>() + base;
  const T* d_y = op.d_y.as<T>() + base;
  const float r = inverse_rms(values, op.width, op.eps);
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    product += load_float(d_y + c) * op.w[c] * fast_sigmoid(load_float(gates + c)) * load_float(values + c);
  }
  const float pull = warp_sum(product) / static_cast<float>(op.width) * r * r;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float o = load_float(values + c);
    const float s = fast_sigmoid(load_float(gates + c));
    const float weighted = load_float(d_y + c) * op.w[c];
    store_float(op.d_o.as<T>() + base + c, r * (weighted * s - o * pull));
    store_float(op.d_gate.as<T>() + base + c, weighted * o * r * s * (1.0F - s));
  }
  if (threadIdx.x % kWarp == 0) inverse[row] = r;
}

template <typename T>
struct WeightTerm {
  const T* o;
  const T* gate;
  const T* d_y;
  const float* inverse;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t at = row * width + column;
    return load_float(d_y + at) * load_float(o + at) * inverse[row] * fast_sigmoid(load_float(gate + at));
  }
};

// False: the rows are not for registers.
template <typename T>
bool launch_in_registers(OpCall& call, const GatedRmsNormBackward& op) {
  const bool sixteens = aligned(op.o.at()) && aligned(op.gate.at()) && aligned(op.d_y.at()) &&
                        aligned(op.d_o.at()) && aligned(op.d_gate.at()) && aligned(op.w);
  return sixteens && with_row_group<T>(op.width, [&](auto group) {
           using Group = decltype(group);
           const std::int64_t blocks = row_blocks<Group>(op.rows);
           float* partial = op.d_w == nullptr ? nullptr : call.scratch<float>(blocks * op.width);
           call.launch(gated_backward<Group>, Grid{.x = blocks, .threads = Group::kBlock}, op, partial);
           if (partial != nullptr) sum_slices<Accumulate::kAdd>(call, partial, blocks, op.width, op.d_w);
         });
}

}  // namespace

void launch(OpCall& call, const GatedRmsNorm& op) {
  call.set_shape({op.rows, op.width});
  const Dtype dtype = op.o.dtype();
  call.require(op.gate.dtype() == dtype && op.y.dtype() == dtype, "all arrays must have one type");
  if (op.rows <= 0) return;
  const bool sixteens = aligned(op.o.at()) && aligned(op.gate.at()) && aligned(op.y.at()) && aligned(op.w);
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (sixteens && with_row_group<T>(op.width, [&](auto group) {
          using Group = decltype(group);
          call.launch(gated_forward<Group>,
                      Grid{.x = ceil_div(op.rows, Group::kRows), .threads = Group::kBlock}, op);
        })) {
      return;
    }
    call.launch(any_forward<T>, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op);
  });
}

void launch(OpCall& call, const GatedRmsNormBackward& op) {
  call.set_shape({op.rows, op.width});
  const Dtype dtype = op.o.dtype();
  call.require(op.gate.dtype() == dtype && op.d_y.dtype() == dtype && op.d_o.dtype() == dtype &&
                   op.d_gate.dtype() == dtype,
               "all arrays must have one type");
  if (op.rows <= 0) return;
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (launch_in_registers<T>(call, op)) return;
    auto* inverse = call.scratch<float>(op.rows);
    call.launch(any_backward<T>, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op,
                inverse);
    if (op.d_w == nullptr) return;
    add_column_sums(call, WeightTerm<T>{op.o.as<T>(), op.gate.as<T>(), op.d_y.as<T>(), inverse, op.width},
                    op.rows, op.width, op.d_w);
  });
}

}  // namespace terrace::trainer::cuda
