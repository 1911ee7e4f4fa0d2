// p[t] = sum_j w[j] x[t - taps + 1 + j], zero before the sequence's start;  y = silu(p)
//   x, y: (B, T, C)   w: (C, taps)
// d_p = d_y silu'(p);  d_x[t] = sum_j w[j] d_p[t + taps - 1 - j];  d_w[j] = sum over b, t of
//   d_p[t] x[t - taps + 1 + j]
// Two to four taps: a thread takes four channels and walks over a span of tokens with the last few in
// registers and the next few on their way; a warp takes 128 channels of one span. Else a thread takes one
// number, and backward keeps d_p.
#include <type_traits>

#include "examples/moe_trainer/ops/cuda/column_sum.cuh"
#include "examples/moe_trainer/ops/cuda/conv_shape.cuh"
#include "examples/moe_trainer/ops/cuda/elements.cuh"
#include "examples/moe_trainer/ops/cuda/operators.hpp"
#include "examples/moe_trainer/ops/cuda/reduce.cuh"

namespace terrace::trainer::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWarpChannels = 4 * kWarp;
// Tokens of a span, and spans of a block, whose warps share out the channels of each.
constexpr int kForwardSpan = 64, kForwardSpans = 1;
constexpr int kBackwardSpan = 128, kBackwardSpans = 4;
// Tokens whose loads are under way while a thread works.
template <typename T>
constexpr int kAhead = sizeof(T) == 4 ? 2 : 4;

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
template <int kSpans>
constexpr int kBlockChannels = kWarps / kSpans* kWarpChannels;
template <int kSpans>
__device__ Place place_of(const ConvShape& shape, int span) {
  constexpr int kPieces = kWarps / kSpans;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto columns =
      static_cast<unsigned>((shape.channels + kBlockChannels<kSpans> - 1) / kBlockChannels<kSpans>);
  const std::int64_t span_block = blockIdx.x / columns;
  return {
      std::int64_t{blockIdx.x % columns} * kBlockChannels<kSpans> + warp % kPieces * kWarpChannels + lane * 4,
      (span_block * kSpans + warp / kPieces) * span, span_block};
}
template <int kSpans>
[[nodiscard]] std::int64_t span_blocks(const ConvShape& shape, int span) {
  return ceil_div(shape.tokens, std::int64_t{span} * kSpans);
}

// The sequence of the span's token t, counted from the span's first token.
struct Bounds {
  int start, end;
};
__device__ Bounds bounds_at(const ConvShape& shape, const Place& place, int t) {
  constexpr std::int64_t kFar = 1 << 20;
  const Sequence sequence = sequence_of(shape.packing, shape.length, place.begin + t);
  return {static_cast<int>(max(sequence.start - place.begin, -kFar)),
          static_cast<int>(min(sequence.end - place.begin, kFar))};
}

// The next kAhead tokens' numbers as they lie in memory.
template <typename T>
class Stream {
 public:
  // at: token 0's; numbers of the tokens from `end` on are zeros.
  __device__ Stream(const T* at, std::int64_t stride, int end) : at_(at), stride_(stride), end_(end) {
#pragma unroll
    for (int i = 0; i < kAhead<T>; ++i) fetch(i, i);
  }
  // The number of token t, which slot i holds, and takes the token that comes kAhead later.
  __device__ float4 take(int i, int t) {
    const float4 now = widen(raw_[i]);
    fetch(i, t + kAhead<T>);
    return now;
  }
  // Slots move up, once the first has been taken alone.
  __device__ void shift() {
    const Raw first = raw_[0];
#pragma unroll
    for (int i = 0; i + 1 < kAhead<T>; ++i) raw_[i] = raw_[i + 1];
    raw_[kAhead<T> - 1] = first;
  }

 private:
  using Raw = std::conditional_t<sizeof(T) == 4, float4, uint2>;
  static __device__ float4 widen(float4 raw) { return raw; }
  static __device__ float4 widen(uint2 raw) {
    return {low_half(raw.x), high_half(raw.x), low_half(raw.y), high_half(raw.y)};
  }
  __device__ void fetch(int i, int t) {
    raw_[i] = Raw{};
    if (t < end_) raw_[i] = __ldcs(reinterpret_cast<const Raw*>(at_));
    at_ += stride_;
  }

  const T* at_;  // of the next to be fetched
  std::int64_t stride_;
  int end_;
  Raw raw_[kAhead<T>];
};

// The weights of a thread's channels, and the numbers before the token it is at.
template <int kTaps>
struct Window {
  float4 w[kTaps], x[kTaps];  // x[kTaps - 1]: the token itself

  __device__ void load_weights(const float* at) {
    float own[4 * kTaps];
    load_shared_row(at, own);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) w[j] = {own[j], own[kTaps + j], own[2 * kTaps + j], own[3 * kTaps + j]};
  }
  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) x[j] = {0.0F, 0.0F, 0.0F, 0.0F};
  }
  // What the sequence has before token 0, which lies at `at`; its first token is `first`, 0 or less.
  template <typename T>
  __device__ void start(const T* at, std::int64_t stride, int first) {
    clear();
#pragma unroll
    for (int j = 1; j < kTaps; ++j) {
      if (j - kTaps >= first) x[j] = load_four(at + (j - kTaps) * stride);
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
  const Place place = place_of<kForwardSpans>(shape, kForwardSpan);
  if (place.channel >= shape.channels || place.begin >= shape.tokens) return;
  const int end = static_cast<int>(min(shape.tokens - place.begin, std::int64_t{kForwardSpan}));
  const T* from = x + place.begin * shape.x_stride + place.channel;
  T* to = y + place.begin * shape.y_stride + place.channel;
  Stream<T> stream(from, shape.x_stride, end);
  Window<kTaps> window;
  window.load_weights(w + place.channel * kTaps);
  Bounds bounds = bounds_at(shape, place, 0);
  window.start(from, shape.x_stride, bounds.start);
  const auto step = [&](int slot, int t) {
    window.push(stream.take(slot, t));
    const float4 p = window.convolve();
    store_four(to, {silu(p.x), silu(p.y), silu(p.z), silu(p.w)});
    to += shape.y_stride;
  };
  for (int t = 0; t < end;) {
    if (t + kAhead<T> <= min(end, bounds.end)) {
#pragma unroll
      for (int i = 0; i < kAhead<T>; ++i) step(i, t + i);
      t += kAhead<T>;
      continue;
    }
    if (t == bounds.end) {
      bounds = bounds_at(shape, place, t);
      window.clear();
    }
    step(0, t++);
    stream.shift();
  }
}

template <typename T>
struct Gradients {
  T* d_x;          // null: not wanted
  float* partial;  // (span blocks, channels * taps); null: not wanted
};

// Sums the warps' parts, in order of their spans.
template <int kTaps>
__device__ void store_weight_parts(const ConvShape& shape, const Place& place, const float4 (&d_w)[kTaps],
                                   float* partial) {
  constexpr int kPieces = kWarps / kBackwardSpans, kEach = 4 * kTaps;  // numbers of a lane
  __shared__ float parts[kWarps][kEach][kWarp + 1];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    parts[warp][j][lane] = d_w[j].x;
    parts[warp][kTaps + j][lane] = d_w[j].y;
    parts[warp][2 * kTaps + j][lane] = d_w[j].z;
    parts[warp][3 * kTaps + j][lane] = d_w[j].w;
  }
  __syncthreads();
  const std::int64_t first = place.channel - warp % kPieces * kWarpChannels - lane * 4;  // of the block
  float* to = partial + place.span_block * shape.channels * kTaps;
  for (int i = static_cast<int>(threadIdx.x); i < kPieces * kWarp * kEach; i += kThreads) {
    const std::int64_t column = first * kTaps + i;
    if (column >= shape.channels * kTaps) continue;
    const int piece = i / (kWarp * kEach), within = i % (kWarp * kEach);
    float total = 0.0F;
#pragma unroll
    for (int span = 0; span < kBackwardSpans; ++span) {
      total += parts[span * kPieces + piece][within % kEach][within / kEach];
    }
    to[column] = total;
  }
}

enum class Wanted : std::uint8_t { kWeights, kInputToo };  // gradients

// What a thread of the backward walk carries from token to token.
template <typename T, int kTaps, Wanted kWanted>
struct BackwardWalk {
  Window<kTaps> window;
  float4 open[kTaps];  // open[k]: what is known of d_x of token t - k
  float4 d_w[kTaps];
  T* to;  // d_x of token t - kTaps + 1; not used where it is not wanted
  std::int64_t stride;

  enum class Where : std::uint8_t { kInside, kAnywhere };
  // Inside: the last kTaps tokens are of one sequence and of this span.
  template <Where kWhere>
  __device__ void step(int t, int end, const Bounds& bounds, float4 x, float4 d_y) {
    window.push(x);
    const float4 p = window.convolve();
    const float4 d_p = d_y * float4{silu_slope(p.x), silu_slope(p.y), silu_slope(p.z), silu_slope(p.w)};
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (kWhere == Where::kInside || t - k >= bounds.start)
        add_product(open[k], window.w[kTaps - 1 - k], d_p);
      if (kWhere == Where::kInside || t < end) {
        add_product(d_w[kTaps - 1 - k], d_p, window.x[kTaps - 1 - k]);
      }
    }
    if constexpr (kWanted == Wanted::kInputToo) {
      if (kWhere == Where::kInside || t >= kTaps - 1) store_four(to, open[kTaps - 1]);
      to += stride;
    }
#pragma unroll
    for (int k = kTaps - 1; k > 0; --k) open[k] = open[k - 1];
    open[0] = {0.0F, 0.0F, 0.0F, 0.0F};
  }
};

// After token t, d_x of token t - kTaps + 1 is complete; the span's last ones need d_p past its end, where
// there are tokens: past the last one d_y is zero.
template <typename T, int kTaps, Wanted kWanted>
__device__ void walk_span(const ConvShape& shape, const Place& place, const T* x, const T* d_y,
                          BackwardWalk<T, kTaps, kWanted>& walk) {
  using Where = typename BackwardWalk<T, kTaps, kWanted>::Where;
  const int left = static_cast<int>(min(shape.tokens - place.begin, std::int64_t{kBackwardSpan + kTaps}));
  const int end = min(left, kBackwardSpan), last = end + kTaps - 1, loaded = min(left, last);
  const T* from = x + place.begin * shape.x_stride + place.channel;
  Stream<T> numbers(from, shape.x_stride, loaded);
  Stream<T> slopes(d_y + place.begin * shape.y_stride + place.channel, shape.y_stride, loaded);
  Bounds bounds = bounds_at(shape, place, 0);
  walk.window.start(from, shape.x_stride, bounds.start);
  for (int t = 0; t < last;) {
    if (t - kTaps + 1 >= max(bounds.start, 0) && t + kAhead<T> <= min(end, bounds.end)) {
#pragma unroll
      for (int i = 0; i < kAhead<T>; ++i) {
        const float4 number = numbers.take(i, t + i), slope = slopes.take(i, t + i);
        walk.template step<Where::kInside>(t + i, end, bounds, number, slope);
      }
      t += kAhead<T>;
      continue;
    }
    if (t == bounds.end && t < left) {
      bounds = bounds_at(shape, place, t);
      walk.window.clear();
    }
    const float4 number = numbers.take(0, t), slope = slopes.take(0, t);
    walk.template step<Where::kAnywhere>(t, end, bounds, number, slope);
    numbers.shift();
    slopes.shift();
    ++t;
  }
}

template <typename T, int kTaps, Wanted kWanted>
__global__ void __launch_bounds__(kThreads, 2)
    walk_backward(ConvShape shape, const T* x, const float* w, const T* d_y, Gradients<T> gradients) {
  const Place place = place_of<kBackwardSpans>(shape, kBackwardSpan);
  BackwardWalk<T, kTaps, kWanted> walk;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) walk.d_w[j] = walk.open[j] = {0.0F, 0.0F, 0.0F, 0.0F};
  if (place.channel < shape.channels && place.begin < shape.tokens) {
    walk.stride = shape.x_stride;
    walk.to = nullptr;
    if constexpr (kWanted == Wanted::kInputToo) {
      walk.to = gradients.d_x + (place.begin - kTaps + 1) * shape.x_stride + place.channel;
    }
    walk.window.load_weights(w + place.channel * kTaps);
    walk_span(shape, place, x, d_y, walk);
  }
  if (gradients.partial != nullptr) store_weight_parts<kTaps>(shape, place, walk.d_w, gradients.partial);
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
template <int kSpans>
[[nodiscard]] Grid walk_grid(const ConvShape& shape, int span) {
  return {.x = span_blocks<kSpans>(shape, span) * ceil_div(shape.channels, kBlockChannels<kSpans>),
          .threads = kThreads};
}

template <typename Op>
void check(OpCall& call, const Op& op) {
  call.require(op.taps >= 1 && op.taps <= 16, "taps must be 1 to 16");
  call.require(!op.packing || op.batch == 1, "packed sequences are one batch row");
}

template <typename T>
bool launch_walk(OpCall& call, const CausalConvBackward& op, const ConvShape& shape) {
  const bool fours = aligned_fours(op.x) && aligned_fours(op.d_y) && aligned_fours(op.d_x) && aligned(op.w);
  return fours && with_taps(shape, [&](auto taps) {
           const std::int64_t slices = span_blocks<kBackwardSpans>(shape, kBackwardSpan),
                              columns = shape.channels * shape.taps;
           float* partial = op.d_w == nullptr ? nullptr : call.scratch<float>(slices * columns);
           constexpr int kTaps = decltype(taps)::value;
           const auto kernel = op.d_x ? walk_backward<T, kTaps, Wanted::kInputToo>
                                      : walk_backward<T, kTaps, Wanted::kWeights>;
           call.launch(kernel, walk_grid<kBackwardSpans>(shape, kBackwardSpan), shape, op.x.as<T>(), op.w,
                       op.d_y.as<T>(), Gradients<T>{op.d_x.as<T>(), partial});
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
    const bool fours = aligned_fours(op.x) && aligned_fours(op.y) && aligned(op.w);
    if (fours && with_taps(shape, [&](auto taps) {
          call.launch(walk_forward<T, decltype(taps)::value>, walk_grid<kForwardSpans>(shape, kForwardSpan),
                      shape, op.x.as<T>(), op.w, op.y.as<T>());
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
