// p[t] = sum_j w[j] x[t - taps + 1 + j], zero before the sequence's start;  y = silu(p)
//   x, y: (B, T, C)   w: (C, taps)
// d_p = d_y silu'(p);  d_x[t] = sum_j w[j] d_p[t + taps - 1 - j];  d_w[j] = sum over b, t of
//   d_p[t] x[t - taps + 1 + j]
// Two to four taps: a thread takes four channels and walks over a span of tokens with the last few in
// registers, a warp takes 128 channels of one span. Else a thread takes one number, and backward keeps d_p.
#include <type_traits>

#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/conv_shape.cuh"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSpans = kThreads / kWarp;  // of a block
constexpr int kChannels = 4 * kWarp;      // of a block
constexpr int kAhead = 4;                 // tokens whose loads are under way together
constexpr std::int64_t kForwardSpan = 32, kBackwardSpan = 64;

__device__ float4 operator*(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
__device__ void add_product(float4& to, float4 a, float4 b) {
  to.x += a.x * b.x;
  to.y += a.y * b.y;
  to.z += a.z * b.z;
  to.w += a.w * b.w;
}
__device__ float silu(float p) { return p * fast_sigmoid(p); }
__device__ float silu_slope(float p) {
  const float s = fast_sigmoid(p);
  return s * (1.0F + p * (1.0F - s));
}

// Where a thread of the walking kernels works.
struct Place {
  std::int64_t channel, begin, span_block;
};
__device__ Place place_of(const ConvShape& shape, std::int64_t span) {
  const std::int64_t columns = (shape.channels + kChannels - 1) / kChannels;
  const std::int64_t span_block = blockIdx.x / columns;
  return {static_cast<std::int64_t>(blockIdx.x) % columns * kChannels + threadIdx.x % kWarp * 4,
          (span_block * kSpans + threadIdx.x / kWarp) * span, span_block};
}
[[nodiscard]] std::int64_t span_blocks(const ConvShape& shape, std::int64_t span) {
  return ceil_div(shape.tokens, span * kSpans);
}

// The weights of a thread's channels, and the numbers before the token it is at.
template <int kTaps>
struct Window {
  float4 w[kTaps], x[kTaps];  // x[kTaps - 1]: the token itself

  __device__ void load_weights(const float* at) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) w[j] = {at[j], at[kTaps + j], at[2 * kTaps + j], at[3 * kTaps + j]};
  }
  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) x[j] = {0.0F, 0.0F, 0.0F, 0.0F};
  }
  // What the sequence has before `token`.
  template <typename T>
  __device__ void start(const T* channel, std::int64_t stride, std::int64_t token, std::int64_t first) {
    clear();
#pragma unroll
    for (int j = 1; j < kTaps; ++j) {
      const std::int64_t from = token - kTaps + j;
      if (from >= first) x[j] = load_four(channel + from * stride);
    }
  }
  __device__ void push(float4 next) {
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) x[j] = x[j + 1];
    x[kTaps - 1] = next;
  }
  [[nodiscard]] __device__ float4 convolve() const {
    float4 p{0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int j = 0; j < kTaps; ++j) add_product(p, w[j], x[j]);
    return p;
  }
};

template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads) walk_forward(ConvShape shape, const T* x, const float* w, T* y) {
  const Place place = place_of(shape, kForwardSpan);
  if (place.channel >= shape.channels || place.begin >= shape.tokens) return;
  const std::int64_t end = min(shape.tokens, place.begin + kForwardSpan);
  const T* from = x + place.channel;
  Window<kTaps> window;
  window.load_weights(w + place.channel * kTaps);
  Sequence sequence = sequence_of(shape.packing, shape.length, place.begin);
  window.start(from, shape.x_stride, place.begin, sequence.start);
  for (std::int64_t t0 = place.begin; t0 < end; t0 += kAhead) {
    float4 next[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (t0 + i < end) next[i] = load_four(from + (t0 + i) * shape.x_stride);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t t = t0 + i;
      if (t >= end) break;
      if (t == sequence.end) {
        sequence = sequence_of(shape.packing, shape.length, t);
        window.clear();
      }
      window.push(next[i]);
      const float4 p = window.convolve();
      store_four(y + t * shape.y_stride + place.channel, {silu(p.x), silu(p.y), silu(p.z), silu(p.w)});
    }
  }
}

struct Gradients {
  void* d_x;
  float* partial;  // (span blocks, channels * taps)
};

// Sums the warps' parts, in order of their spans.
template <int kTaps>
__device__ void store_weight_parts(const ConvShape& shape, const Place& place, const float4 (&d_w)[kTaps],
                                   float* partial) {
  __shared__ float parts[kSpans][4 * kTaps][kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, span = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    parts[span][j][lane] = d_w[j].x;
    parts[span][kTaps + j][lane] = d_w[j].y;
    parts[span][2 * kTaps + j][lane] = d_w[j].z;
    parts[span][3 * kTaps + j][lane] = d_w[j].w;
  }
  __syncthreads();
  const std::int64_t first = place.channel - lane * 4;  // of the block
  float* to = partial + place.span_block * shape.channels * kTaps;
  for (int i = static_cast<int>(threadIdx.x); i < kChannels * kTaps; i += kThreads) {
    const std::int64_t column = first * kTaps + i;
    if (column >= shape.channels * kTaps) continue;
    float total = 0.0F;
#pragma unroll
    for (int each = 0; each < kSpans; ++each) total += parts[each][i % (4 * kTaps)][i / (4 * kTaps)];
    to[column] = total;
  }
}

// After token t, d_x of token t - kTaps + 1 is complete; the span's last ones need d_p past its end.
template <typename T, int kTaps>
__device__ void walk_span(const ConvShape& shape, const Place& place, const T* x, const T* d_y,
                          Window<kTaps>& window, T* d_x, float4 (&d_w)[kTaps]) {
  const std::int64_t end = min(shape.tokens, place.begin + kBackwardSpan);
  const T* from = x + place.channel;
  const T* slope = d_y + place.channel;
  Sequence sequence = sequence_of(shape.packing, shape.length, place.begin);
  window.start(from, shape.x_stride, place.begin, sequence.start);
  float4 open[kTaps];  // open[k]: what is known of d_x of token t - k
#pragma unroll
  for (int k = 0; k < kTaps; ++k) open[k] = {0.0F, 0.0F, 0.0F, 0.0F};
  for (std::int64_t t0 = place.begin; t0 < end + kTaps - 1; t0 += kAhead) {
    float4 next[kAhead], d_next[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t t = t0 + i;
      next[i] = d_next[i] = {0.0F, 0.0F, 0.0F, 0.0F};
      if (t >= shape.tokens || t >= end + kTaps - 1) continue;
      next[i] = load_four(from + t * shape.x_stride);
      d_next[i] = load_four(slope + t * shape.y_stride);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t t = t0 + i;
      if (t == sequence.end && t < shape.tokens) {
        sequence = sequence_of(shape.packing, shape.length, t);
        window.clear();
      }
      window.push(next[i]);
      const float4 p = window.convolve();
      // Zero past the last token.
      const float4 d_p =
          d_next[i] * float4{silu_slope(p.x), silu_slope(p.y), silu_slope(p.z), silu_slope(p.w)};
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (t - k >= sequence.start) add_product(open[k], window.w[kTaps - 1 - k], d_p);
        if (t < end) add_product(d_w[kTaps - 1 - k], d_p, window.x[kTaps - 1 - k]);
      }
      const std::int64_t done = t - kTaps + 1;
      if (d_x != nullptr && done >= place.begin && done < end) {
        store_four(d_x + done * shape.x_stride + place.channel, open[kTaps - 1]);
      }
#pragma unroll
      for (int k = kTaps - 1; k > 0; --k) open[k] = open[k - 1];
      open[0] = {0.0F, 0.0F, 0.0F, 0.0F};
    }
  }
}

template <typename T, int kTaps>
__global__ void __launch_bounds__(kThreads, 2)
    walk_backward(ConvShape shape, const T* x, const float* w, const T* d_y, Gradients gradients) {
  const Place place = place_of(shape, kBackwardSpan);
  float4 d_w[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) d_w[j] = {0.0F, 0.0F, 0.0F, 0.0F};
  if (place.channel < shape.channels && place.begin < shape.tokens) {
    Window<kTaps> window;
    window.load_weights(w + place.channel * kTaps);
    walk_span(shape, place, x, d_y, window, static_cast<T*>(gradients.d_x), d_w);
  }
  if (gradients.partial != nullptr) store_weight_parts<kTaps>(shape, place, d_w, gradients.partial);
}

// The convolution at one token and channel.
template <typename T>
__device__ float convolve(const ConvShape& shape, const T* x, const float* w, std::int64_t token,
                          std::int64_t channel) {
  const std::int64_t start = sequence_of(shape.packing, shape.length, token).start;
  float sum = 0.0F;
  for (std::int64_t j = 0; j < shape.taps; ++j) {
    const std::int64_t from = token - (shape.taps - 1 - j);
    if (from >= start) sum += w[channel * shape.taps + j] * load_float(x + from * shape.x_stride + channel);
  }
  return sum;
}

__device__ std::int64_t element() { return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

template <typename T>
__global__ void any_forward(ConvShape shape, const T* x, const float* w, T* y) {
  const std::int64_t at = element(), token = at / shape.channels, channel = at % shape.channels;
  if (token >= shape.tokens) return;
  store_float(y + token * shape.y_stride + channel, silu(convolve(shape, x, w, token, channel)));
}

// d_p: (tokens, channels), fp32.
template <typename T>
__global__ void any_slopes(ConvShape shape, const T* x, const float* w, const T* d_y, float* d_p) {
  const std::int64_t at = element(), token = at / shape.channels, channel = at % shape.channels;
  if (token >= shape.tokens) return;
  const float slope = silu_slope(convolve(shape, x, w, token, channel));
  d_p[at] = load_float(d_y + token * shape.y_stride + channel) * slope;
}

template <typename T>
__global__ void any_input_backward(ConvShape shape, const float* w, const float* d_p, T* d_x) {
  const std::int64_t at = element(), token = at / shape.channels, channel = at % shape.channels;
  if (token >= shape.tokens) return;
  const std::int64_t end = sequence_of(shape.packing, shape.length, token).end;
  float sum = 0.0F;
  for (std::int64_t j = 0; j < shape.taps; ++j) {
    const std::int64_t ahead = shape.taps - 1 - j;
    if (token + ahead < end) sum += w[channel * shape.taps + j] * d_p[at + ahead * shape.channels];
  }
  store_float(d_x + token * shape.x_stride + channel, sum);
}

// Row: a token; column: channel * taps + j.
template <typename T>
struct WeightTerm {
  ConvShape shape;
  const T* x;
  const float* d_p;
  __device__ float operator()(std::int64_t row, std::int64_t column) const {
    const std::int64_t channel = column / shape.taps;
    const std::int64_t from = row - (shape.taps - 1 - column % shape.taps);
    if (from < sequence_of(shape.packing, shape.length, row).start) return 0.0F;
    return d_p[row * shape.channels + channel] * load_float(x + from * shape.x_stride + channel);
  }
};

// body(the number of taps) where a walking kernel has it.
template <typename Body>
bool with_taps(const ConvShape& shape, Body&& body) {
  if (shape.channels % 4 != 0 || shape.x_stride % 4 != 0 || shape.y_stride % 4 != 0) return false;
  const auto take = [&](auto taps) { return body(taps), true; };
  if (shape.taps == 4) return take(std::integral_constant<int, 4>{});
  if (shape.taps == 3) return take(std::integral_constant<int, 3>{});
  if (shape.taps == 2) return take(std::integral_constant<int, 2>{});
  return false;
}
[[nodiscard]] Grid walk_grid(const ConvShape& shape, std::int64_t span) {
  return {.x = span_blocks(shape, span) * ceil_div(shape.channels, kChannels), .threads = kThreads};
}

template <typename Op>
void check(OpCall& call, const Op& op) {
  call.require(op.taps >= 1 && op.taps <= 16, "taps must be 1 to 16");
  call.require(!op.packing || op.batch == 1, "packed sequences are one batch row");
}

template <typename T>
bool launch_walk(OpCall& call, const CausalConvBackward& op, const ConvShape& shape) {
  const bool fours = aligned_fours(op.x) && aligned_fours(op.d_y) && aligned_fours(op.d_x);
  return fours && with_taps(shape, [&](auto taps) {
           const std::int64_t slices = span_blocks(shape, kBackwardSpan),
                              columns = shape.channels * shape.taps;
           float* partial = op.d_w == nullptr ? nullptr : call.scratch<float>(slices * columns);
           call.launch(walk_backward<T, decltype(taps)::value>, walk_grid(shape, kBackwardSpan), shape,
                       op.x.as<T>(), op.w, op.d_y.as<T>(), Gradients{op.d_x.at(), partial});
           if (partial != nullptr) sum_slices<Accumulate::kAdd>(call, partial, slices, columns, op.d_w);
         });
}

}  // namespace

void launch(OpCall& call, const CausalConv& op) {
  call.set_shape({op.batch, op.length, op.channels, op.taps});
  check(call, op);
  call.require(op.x.dtype() == op.y.dtype(), "all arrays must have one type");
  const ConvShape shape = conv_shape(op);
  if (shape.tokens <= 0 || shape.channels <= 0) return;
  with_element(op.x.dtype(), [&](auto element_type) {
    using T = decltype(element_type);
    const bool fours = aligned_fours(op.x) && aligned_fours(op.y);
    if (fours && with_taps(shape, [&](auto taps) {
          call.launch(walk_forward<T, decltype(taps)::value>, walk_grid(shape, kForwardSpan), shape,
                      op.x.as<T>(), op.w, op.y.as<T>());
        })) {
      return;
    }
    call.launch(any_forward<T>, grid_for(shape.tokens * shape.channels), shape, op.x.as<T>(), op.w,
                op.y.as<T>());
  });
}

void launch(OpCall& call, const CausalConvBackward& op) {
  call.set_shape({op.batch, op.length, op.channels, op.taps});
  check(call, op);
  call.require(op.x.dtype() == op.d_y.dtype() && (!op.d_x || op.d_x.dtype() == op.x.dtype()),
               "all arrays must have one type");
  const ConvShape shape = conv_shape(op);
  if (shape.tokens <= 0 || shape.channels <= 0) return;
  with_element(op.x.dtype(), [&](auto element_type) {
    using T = decltype(element_type);
    if (launch_walk<T>(call, op, shape)) return;
    const Grid grid = grid_for(shape.tokens * shape.channels);
    auto* d_p = call.scratch<float>(shape.tokens * shape.channels);
    call.launch(any_slopes<T>, grid, shape, op.x.as<T>(), op.w, op.d_y.as<T>(), d_p);
    if (op.d_x) call.launch(any_input_backward<T>, grid, shape, op.w, d_p, op.d_x.as<T>());
    if (op.d_w == nullptr) return;
    add_column_sums(call, WeightTerm<T>{shape, op.x.as<T>(), d_p}, shape.tokens, shape.channels * shape.taps,
                    op.d_w);
  });
}

}  // namespace terrace::trainer::cuda
