// y = x r w,  r = (mean x^2 + eps)^-1/2          x, y: (rows, width)   w: (width)
// With a residual: x + residual, rounded to its type, is stored as `sum` and takes x's place.
// g = d_y w:  d_x = r (g - x r^2 mean(g x)) [+ d_sum],  d_w = sum over rows of d_y x r
// Rows in registers where 16 bytes divide them; else one warp a row, a number at a time.
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/row_group.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

template <typename Group>
__global__ void __launch_bounds__(Group::kBlock) rms_forward(RmsNorm op) {
  using T = typename Group::Element;
  constexpr int kNumbers = Group::kNumbers;
  const std::int64_t row = std::int64_t{blockIdx.x} * Group::kRows + Group::row_in_block();
  const bool live = row < op.rows;
  const std::int64_t first = row * op.width;
  uint4 x[Group::kPacks];
  load_row<Group>(op.x.as<T>() + first, op.width, live, x);
  if (op.sum.at() != nullptr) {
    uint4 residual[Group::kPacks];
    load_row<Group>(op.residual.as<T>() + first, op.width, live, residual);
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) {
      float a[kNumbers], b[kNumbers];
      unpack<T>(x[i], a);
      unpack<T>(residual[i], b);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) a[n] += b[n];
      x[i] = pack<T>(a);
      const int column = Group::column(i);
      if (live && column < op.width) store_raw(op.sum.as<T>() + first + column, x[i]);
    }
  }
  float squares[1] = {};
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    float a[kNumbers];
    unpack<T>(x[i], a);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) squares[0] += a[n] * a[n];
  }
  group_sums<Group>(squares);
  const float r = 1.0F / sqrtf(squares[0] / static_cast<float>(op.width) + op.eps);
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    const int column = Group::column(i);
    if (!live || column >= op.width) continue;
    float a[kNumbers], w[kNumbers];
    unpack<T>(x[i], a);
    load_shared_row(op.w + column, w);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) a[n] = a[n] * r * w[n];
    store_raw(op.y.as<T>() + first + column, pack<T>(a));
  }
}

// partial: (blocks, width), the blocks' parts of d_w; null: not wanted. The next row's loads are under way
// while a row is worked on.
template <typename Group>
__global__ void __launch_bounds__(Group::kBlock, Group::kResident)
    rms_backward(RmsNormBackward op, float* partial) {
  using T = typename Group::Element;
  constexpr int kNumbers = Group::kNumbers;
  float d_w[Group::kPacks][kNumbers] = {};
  const std::int64_t step = std::int64_t{gridDim.x} * Group::kRows;
  std::int64_t row = std::int64_t{blockIdx.x} * Group::kRows + Group::row_in_block();
  uint4 next_x[Group::kPacks], next_d_y[Group::kPacks];
  const auto fetch = [&](std::int64_t which) {
    load_row<Group>(op.x.as<T>() + which * op.width, op.width, which < op.rows, next_x);
    load_row<Group>(op.d_y.as<T>() + which * op.width, op.width, which < op.rows, next_d_y);
  };
  fetch(row);
  for (; row - Group::row_in_block() < op.rows; row += step) {
    const std::int64_t first = row * op.width;
    const bool live = row < op.rows;
    uint4 x[Group::kPacks], d_y[Group::kPacks];
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) x[i] = next_x[i], d_y[i] = next_d_y[i];
    fetch(row + step);
    float sums[2] = {};  // x^2, g x
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) {
      const int column = Group::column(i);
      if (column >= op.width) continue;
      float a[kNumbers], dy[kNumbers], w[kNumbers];
      unpack<T>(x[i], a);
      unpack<T>(d_y[i], dy);
      load_shared_row(op.w + column, w);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        sums[0] += a[n] * a[n];
        sums[1] += dy[n] * w[n] * a[n];
      }
    }
    group_sums<Group>(sums);
    const float r = 1.0F / sqrtf(sums[0] / static_cast<float>(op.width) + op.eps);
    const float pull = sums[1] / static_cast<float>(op.width) * r * r;
#pragma unroll
    for (int i = 0; i < Group::kPacks; ++i) {
      const int column = Group::column(i);
      if (!live || column >= op.width) continue;
      float a[kNumbers], dy[kNumbers], w[kNumbers];
      unpack<T>(x[i], a);
      unpack<T>(d_y[i], dy);
      load_shared_row(op.w + column, w);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        d_w[i][n] += dy[n] * a[n] * r;
        a[n] = r * (dy[n] * w[n] - a[n] * pull);
      }
      T* d_x = op.d_x.as<T>() + first + column;
      if (op.d_sum.at() != nullptr) {
        unpack<T>(load_raw(op.d_sum.as<T>() + first + column), w);
#pragma unroll
        for (int n = 0; n < kNumbers; ++n) a[n] += w[n];
      }
      if (op.into_d_x == Accumulate::kAdd) {
        unpack<T>(load_raw(d_x), w);
#pragma unroll
        for (int n = 0; n < kNumbers; ++n) a[n] += w[n];
      }
      store_raw(d_x, pack<T>(a));
    }
  }
  if (partial != nullptr) store_column_parts<Group>(d_w, op.width, partial);
}

template <typename T>
__device__ float inverse_rms(const T* x, std::int64_t width, float eps) {
  float squares = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < width; c += kWarp) {
    squares += load_float(x + c) * load_float(x + c);
  }
  return 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
}

template <typename T>
__global__ void any_forward(RmsNorm op) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const std::int64_t first = row * op.width;
  const T* x = op.x.as<T>() + first;
  if (op.sum.at() != nullptr) {
    T* sum = op.sum.as<T>() + first;
    for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
      store_float(sum + c, load_float(x + c) + load_float(op.residual.as<T>() + first + c));
    }
    x = sum;  // a lane reads again what it wrote itself
  }
  const float r = inverse_rms(x, op.width, op.eps);
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    store_float(op.y.as<T>() + first + c, load_float(x + c) * r * op.w[c]);
  }
}

template <typename T>
__global__ void any_backward(RmsNormBackward op, float* inverse) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const T* x = op.x.as<T>() + row * op.width;
  const T* d_y = op.d_y.as<T>() + row * op.width;
  const float r = inverse_rms(x, op.width, op.eps);
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    product += load_float(d_y + c) * op.w[c] * load_float(x + c);
  }
  const float pull = warp_sum(product) / static_cast<float>(op.width) * r * r;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const std::int64_t at = row * op.width + c;
    float gradient = r * (load_float(d_y + c) * op.w[c] - load_float(x + c) * pull);
    if (op.d_sum.at() != nullptr) gradient += load_float(op.d_sum.as<T>() + at);
    if (op.into_d_x == Accumulate::kAdd) gradient += load_float(op.d_x.as<T>() + at);
    store_float(op.d_x.as<T>() + at, gradient);
  }
  if (threadIdx.x % kWarp == 0) inverse[row] = r;
}

template <typename T>
struct WeightTerm {
  const T* x;
  const T* d_y;
  const float* inverse;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t at = row * width + column;
    return load_float(d_y + at) * load_float(x + at) * inverse[row];
  }
};

// False: the rows are not for registers.
template <typename T>
bool launch_in_registers(OpCall& call, const RmsNormBackward& op) {
  const bool sixteens = aligned(op.x.at()) && aligned(op.d_y.at()) && aligned(op.d_x.at()) &&
                        aligned(op.d_sum.at()) && aligned(op.w);
  return sixteens && with_row_group<T>(op.width, [&](auto group) {
           using Group = decltype(group);
           const std::int64_t blocks = row_blocks<Group>(op.rows);
           float* partial = op.d_w == nullptr ? nullptr : call.scratch<float>(blocks * op.width);
           call.launch(rms_backward<Group>, Grid{.x = blocks, .threads = Group::kBlock}, op, partial);
           if (partial != nullptr) sum_slices<Accumulate::kAdd>(call, partial, blocks, op.width, op.d_w);
         });
}

}  // namespace

void launch(OpCall& call, const RmsNorm& op) {
  call.set_shape({op.rows, op.width});
  const Dtype dtype = op.x.dtype();
  call.require(static_cast<bool>(op.residual) == static_cast<bool>(op.sum),
               "a residual and its sum come together");
  call.require(
      op.y.dtype() == dtype && (!op.sum || (op.sum.dtype() == dtype && op.residual.dtype() == dtype)),
      "all arrays must have one type");
  if (op.rows <= 0) return;
  const bool sixteens = aligned(op.x.at()) && aligned(op.y.at()) && aligned(op.residual.at()) &&
                        aligned(op.sum.at()) && aligned(op.w);
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (sixteens && with_row_group<T>(op.width, [&](auto group) {
          using Group = decltype(group);
          call.launch(rms_forward<Group>,
                      Grid{.x = ceil_div(op.rows, Group::kRows), .threads = Group::kBlock}, op);
        })) {
      return;
    }
    call.launch(any_forward<T>, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op);
  });
}

void launch(OpCall& call, const RmsNormBackward& op) {
  call.set_shape({op.rows, op.width});
  const Dtype dtype = op.x.dtype();
  call.require(op.d_y.dtype() == dtype && op.d_x.dtype() == dtype && (!op.d_sum || op.d_sum.dtype() == dtype),
               "all arrays must have one type");
  if (op.rows <= 0) return;
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (launch_in_registers<T>(call, op)) return;
    auto* inverse = call.scratch<float>(op.rows);
    call.launch(any_backward<T>, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op,
                inverse);
    if (op.d_w == nullptr) return;
    add_column_sums(call, WeightTerm<T>{op.x.as<T>(), op.d_y.as<T>(), inverse, op.width}, op.rows, op.width,
                    op.d_w);
  });
}

}  // namespace terrace::trainer::cuda
