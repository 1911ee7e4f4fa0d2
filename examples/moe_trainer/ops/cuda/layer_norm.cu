// y = n w + b,  n = (x - mean) r,  r = (var + eps)^-1/2       x, y: (rows, width)   w, b: (width)
// g = d_y w:  d_x = r (g - mean(g) - n mean(g n)),  d_w = sum over rows of d_y n,  d_b = sum over rows of d_y
// The variance is taken around the mean. Rows in registers where 16 bytes divide them; else one warp a row.
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/row_group.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / kWarp;

struct Moments {
  float mean;
  float inverse;  // of the standard deviation
};

struct RowShape {
  std::int64_t width;
  float eps;
};

// Of a row in the group's registers; what lies past its width does not count.
template <typename Group>
__device__ Moments moments_of(const uint4 (&x)[Group::kPacks], const RowShape& shape) {
  using T = typename Group::Element;
  float sum[1] = {}, squares[1] = {};
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    float a[Group::kNumbers];
    unpack<T>(x[i], a);
#pragma unroll
    for (int n = 0; n < Group::kNumbers; ++n) sum[0] += a[n];
  }
  group_sums<Group>(sum);
  const float mean = sum[0] / static_cast<float>(shape.width);
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    if (Group::column(i) >= shape.width) continue;
    float a[Group::kNumbers];
    unpack<T>(x[i], a);
#pragma unroll
    for (int n = 0; n < Group::kNumbers; ++n) squares[0] += (a[n] - mean) * (a[n] - mean);
  }
  group_sums<Group>(squares);
  return {mean, 1.0F / sqrtf(squares[0] / static_cast<float>(shape.width) + shape.eps)};
}

template <typename Group>
__global__ void __launch_bounds__(Group::kBlock) layer_forward(LayerNorm op) {
  using T = typename Group::Element;
  constexpr int kNumbers = Group::kNumbers;
  const std::int64_t row = std::int64_t{blockIdx.x} * Group::kRows + Group::row_in_block();
  const bool live = row < op.rows;
  uint4 x[Group::kPacks];
  load_row<Group>(op.x.as<T>() + row * op.width, op.width, live, x);
  const Moments m = moments_of<Group>(x, {op.width, op.eps});
#pragma unroll
  for (int i = 0; i < Group::kPacks; ++i) {
    const int column = Group::column(i);
    if (!live || column >= op.width) continue;
    float a[kNumbers], w[kNumbers], b[kNumbers];
    unpack<T>(x[i], a);
    load_shared_row(op.w + column, w);
    load_shared_row(op.b + column, b);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) a[n] = (a[n] - m.mean) * m.inverse * w[n] + b[n];
    store_raw(op.y.as<T>() + row * op.width + column, pack<T>(a));
  }
}

// The blocks' parts of d_w and d_b, each (blocks, width).
struct Partials {
  float* d_w;
  float* d_b;
};

template <typename Group>
__global__ void __launch_bounds__(Group::kBlock) layer_backward(LayerNormBackward op, Partials partials) {
  using T = typename Group::Element;
  constexpr int kNumbers = Group::kNumbers;
  float d_w[Group::kPacks][kNumbers] = {}, d_b[Group::kPacks][kNumbers] = {};
  for (std::int64_t base = std::int64_t{blockIdx.x} * Group::kRows; base < op.rows;
       base += std::int64_t{gridDim.x} * Group::kRows) {
    const std::int64_t row = base + Group::row_in_block(), first = row * op.width;
    const bool live = row < op.rows;
    uint4 x[Group::kPacks], d_y[Group::kPacks];
    load_row<Group>(op.x.as<T>() + first, op.width, live, x);
    load_row<Group>(op.d_y.as<T>() + first, op.width, live, d_y);
    const Moments m = moments_of<Group>(x, {op.width, op.eps});
    float sums[2] = {};  // g, g n
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
        sums[0] += dy[n] * w[n];
        sums[1] += dy[n] * w[n] * (a[n] - m.mean) * m.inverse;
      }
    }
    group_sums<Group>(sums);
    const float mean_g = sums[0] / static_cast<float>(op.width);
    const float mean_gn = sums[1] / static_cast<float>(op.width);
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
        const float normal = (a[n] - m.mean) * m.inverse;
        d_w[i][n] += dy[n] * normal;
        d_b[i][n] += dy[n];
        a[n] = m.inverse * (dy[n] * w[n] - mean_g - normal * mean_gn);
      }
      T* d_x = op.d_x.as<T>() + first + column;
      if (op.into_d_x == Accumulate::kAdd) {
        unpack<T>(load_raw(d_x), w);
#pragma unroll
        for (int n = 0; n < kNumbers; ++n) a[n] += w[n];
      }
      store_raw(d_x, pack<T>(a));
    }
  }
  store_column_parts<Group>(d_w, op.width, partials.d_w);
  store_column_parts<Group>(d_b, op.width, partials.d_b);
}

template <typename T>
__device__ Moments moments_of(const T* x, const RowShape& shape) {
  float sum = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < shape.width; c += kWarp) sum += load_float(x + c);
  const float mean = warp_sum(sum) / static_cast<float>(shape.width);
  float squares = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < shape.width; c += kWarp) {
    const float centred = load_float(x + c) - mean;
    squares += centred * centred;
  }
  return {mean, 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(shape.width) + shape.eps)};
}

template <typename T>
__global__ void any_forward(LayerNorm op) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const T* x = op.x.as<T>() + row * op.width;
  const Moments m = moments_of(x, {op.width, op.eps});
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    store_float(op.y.as<T>() + row * op.width + c,
                (load_float(x + c) - m.mean) * m.inverse * op.w[c] + op.b[c]);
  }
}

template <typename T>
__global__ void any_backward(LayerNormBackward op, Moments* moments) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarp;
  if (row >= op.rows) return;
  const T* x = op.x.as<T>() + row * op.width;
  const T* d_y = op.d_y.as<T>() + row * op.width;
  const Moments m = moments_of(x, {op.width, op.eps});
  float sum = 0.0F;
  float product = 0.0F;
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float g = load_float(d_y + c) * op.w[c];
    sum += g;
    product += g * (load_float(x + c) - m.mean) * m.inverse;
  }
  const float mean_g = warp_sum(sum) / static_cast<float>(op.width);
  const float mean_gn = warp_sum(product) / static_cast<float>(op.width);
  for (std::int64_t c = threadIdx.x % kWarp; c < op.width; c += kWarp) {
    const float n = (load_float(x + c) - m.mean) * m.inverse;
    const float gradient = m.inverse * (load_float(d_y + c) * op.w[c] - mean_g - n * mean_gn);
    T* out = op.d_x.as<T>() + row * op.width + c;
    store_float(out, op.into_d_x == Accumulate::kAdd ? load_float(out) + gradient : gradient);
  }
  if (threadIdx.x % kWarp == 0) moments[row] = m;
}

template <typename T>
struct WeightTerm {
  const T* x;
  const T* d_y;
  const Moments* moments;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t at = row * width + column;
    return load_float(d_y + at) * (load_float(x + at) - moments[row].mean) * moments[row].inverse;
  }
};
template <typename T>
struct BiasTerm {
  const T* d_y;
  std::int64_t width;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    return load_float(d_y + row * width + column);
  }
};

// False: the rows are not for registers.
template <typename T>
bool launch_in_registers(OpCall& call, const LayerNormBackward& op) {
  const bool sixteens = aligned(op.x.at()) && aligned(op.d_y.at()) && aligned(op.d_x.at()) && aligned(op.w);
  return sixteens && with_row_group<T>(op.width, [&](auto group) {
           using Group = decltype(group);
           const std::int64_t blocks = row_blocks<Group>(op.rows), count = blocks * op.width;
           const Partials partials{call.scratch<float>(count), call.scratch<float>(count)};
           call.launch(layer_backward<Group>, Grid{.x = blocks, .threads = Group::kBlock}, op, partials);
           const auto add = [&](const float* partial, float* out) {
             if (out != nullptr) sum_slices<Accumulate::kAdd>(call, partial, blocks, op.width, out);
           };
           add(partials.d_w, op.d_w);
           add(partials.d_b, op.d_b);
         });
}

}  // namespace

void launch(OpCall& call, const LayerNorm& op) {
  call.set_shape({op.rows, op.width});
  call.require(op.y.dtype() == op.x.dtype(), "all arrays must have one type");
  if (op.rows <= 0) return;
  const bool sixteens = aligned(op.x.at()) && aligned(op.y.at()) && aligned(op.w) && aligned(op.b);
  with_element(op.x.dtype(), [&](auto element) {
    using T = decltype(element);
    if (sixteens && with_row_group<T>(op.width, [&](auto group) {
          using Group = decltype(group);
          call.launch(layer_forward<Group>,
                      Grid{.x = ceil_div(op.rows, Group::kRows), .threads = Group::kBlock}, op);
        })) {
      return;
    }
    call.launch(any_forward<T>, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op);
  });
}

void launch(OpCall& call, const LayerNormBackward& op) {
  call.set_shape({op.rows, op.width});
  const Dtype dtype = op.x.dtype();
  call.require(op.d_y.dtype() == dtype && op.d_x.dtype() == dtype, "all arrays must have one type");
  if (op.rows <= 0) return;
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    if (launch_in_registers<T>(call, op)) return;
    auto* moments = call.scratch<Moments>(op.rows);
    call.launch(any_backward<T>, Grid{.x = ceil_div(op.rows, kRowsPerBlock), .threads = kThreads}, op,
                moments);
    const T* d_y = op.d_y.as<T>();
    if (op.d_w != nullptr) {
      add_column_sums(call, WeightTerm<T>{op.x.as<T>(), d_y, moments, op.width}, op.rows, op.width, op.d_w);
    }
    if (op.d_b != nullptr) add_column_sums(call, BiasTerm<T>{d_y, op.width}, op.rows, op.width, op.d_b);
  });
}

}  // namespace terrace::trainer::cuda
