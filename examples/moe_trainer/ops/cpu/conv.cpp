// Causal depthwise convolution and silu: z[t] = sum_j w[j] x[t - taps + 1 + j], y = silu(z).
// Backward: dz = dy silu'(z); dx[t] = sum_j w[j] dz[t + taps - 1 - j]; dw[j] = sum_t dz[t] x[t - taps + 1 +
// j]. A task owns sixteen channels of the whole batch, so no sum crosses threads.
#include <array>
#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kMaxTaps = 16;
constexpr std::int64_t kChannels = 16;  // of one task: two vectors, one cache line
constexpr std::int64_t kTimeGrain = 256;

struct Strip {
  Vec half[2];
};

Strip load_strip(const float* p, std::int64_t n) { return {{load_part(p, n), load_part(p + 8, n - 8)}}; }
void store_strip(float* p, const Strip& s, std::int64_t n) {
  store_part(p, s.half[0], n);
  if (n > 8) store_part(p + 8, s.half[1], n - 8);
}

using Taps = std::array<Strip, kMaxTaps>;

// w (C, taps) for the strip's channels, one strip a tap.
Taps load_taps(const float* w, std::int64_t channels, std::int64_t taps) {
  Taps out{};
  for (std::int64_t j = 0; j < taps; ++j) {
    for (std::int64_t c = 0; c < channels; ++c) {
      out[static_cast<std::size_t>(j)].half[c / 8][c % 8] = w[c * taps + j];
    }
  }
  return out;
}

// The number of taps as the compiler knows it: the usual count unrolls, any other is looped over.
template <std::int64_t Known>
struct TapCount {
  std::int64_t asked;
  [[nodiscard]] std::int64_t count() const { return Known > 0 ? Known : asked; }
};
template <typename Body>
void with_tap_count(std::int64_t taps, Body&& body) {
  if (taps == 4) return body(TapCount<4>{taps});
  body(TapCount<0>{taps});
}

// body(j) for the taps that lie inside the sequence at position t.
template <typename Count, typename Body>
inline void for_taps(const Count& taps, std::int64_t t, Body&& body) {
  if (t >= taps.count() - 1) {
    for (std::int64_t j = 0; j < taps.count(); ++j) body(j);
  } else {
    for (std::int64_t j = taps.count() - 1 - t; j < taps.count(); ++j) body(j);
  }
}

// One strip of one sequence: where it starts in x and y, how far apart its tokens are there.
struct Sequence {
  std::int64_t x, y, length, x_stride, y_stride, channels;
};
template <typename Op>
Sequence strip_of(const Op& op, std::int64_t token, std::int64_t length, std::int64_t channel) {
  const std::int64_t x_stride = op.x_stride == 0 ? op.channels : op.x_stride;
  const std::int64_t y_stride = op.y_stride == 0 ? op.channels : op.y_stride;
  return {token * x_stride + channel,
          token * y_stride + channel,
          length,
          x_stride,
          y_stride,
          std::min(kChannels, op.channels - channel)};
}

// body(first token, tokens) for each sequence of (B, T).
template <typename Op, typename Body>
void for_sequences(const Op& op, Body&& body) {
  if (!op.packing) {
    for (std::int64_t b = 0; b < op.batch; ++b) body(b * op.length, op.length);
    return;
  }
  const std::int32_t* starts = op.packing.starts;
  for (std::int64_t i = 0; i < op.packing.sequences; ++i) body(starts[i], starts[i + 1] - starts[i]);
}

template <typename Count>
inline Strip convolve(const float* x, const Sequence& s, std::int64_t t, const Taps& w, const Count& taps) {
  Strip z{};
  for_taps(taps, t, [&](std::int64_t j) {
    const Strip row = load_strip(x + (t - taps.count() + 1 + j) * s.x_stride, s.channels);
    for (int h = 0; h < 2; ++h) z.half[h] += w[static_cast<std::size_t>(j)].half[h] * row.half[h];
  });
  return z;
}

// Last position first: dz of the following positions is still at hand in a ring, zeros past the end.
template <typename Count>
void sequence_backward(const CausalConvBackward& op, const Sequence& s, const Taps& w, const Count& taps,
                       Taps& d_w) {
  std::array<Strip, kMaxTaps> ring{};
  const std::int64_t count = taps.count();
  const float* x = op.x + s.x;
  for (std::int64_t t = s.length - 1; t >= 0; --t) {
    const Strip z = convolve(x, s, t, w, taps);
    Strip d_z = load_strip(op.d_y + s.y + t * s.y_stride, s.channels);
    for (int h = 0; h < 2; ++h) {
      const Vec open = sigmoid(z.half[h]);
      d_z.half[h] *= open * (1.0F + z.half[h] * (1.0F - open));
    }
    ring[static_cast<std::size_t>(t % count)] = d_z;
    Strip d_x{};
    for (std::int64_t j = 0; j < count; ++j) {
      const Strip& later = ring[static_cast<std::size_t>((t + count - 1 - j) % count)];
      for (int h = 0; h < 2; ++h) d_x.half[h] += w[static_cast<std::size_t>(j)].half[h] * later.half[h];
    }
    if (op.d_x) store_strip(op.d_x + s.x + t * s.x_stride, d_x, s.channels);
    for_taps(taps, t, [&](std::int64_t j) {
      const Strip row = load_strip(x + (t - count + 1 + j) * s.x_stride, s.channels);
      for (int h = 0; h < 2; ++h) d_w[static_cast<std::size_t>(j)].half[h] += d_z.half[h] * row.half[h];
    });
  }
}

template <typename Op>
Bytes checked(const Op& op) {
  if (op.taps < 1 || op.taps > kMaxTaps) throw std::runtime_error("causal convolution: taps must be 1 to 16");
  if (op.packing && op.batch != 1) {
    throw std::runtime_error("causal convolution: packed sequences are one batch row");
  }
  return {};
}

}  // namespace

// Called when the operator is enqueued, so a bad shape is reported to the caller.
Bytes scratch_bytes(const CausalConv& op) { return checked(op); }
Bytes scratch_bytes(const CausalConvBackward& op) { return checked(op); }

// A task owns a strip of a span of tokens; a sequence that began before the span is read back into.
void compute(const CausalConv& op, std::byte*) {
  const std::int64_t strips = (op.channels + kChannels - 1) / kChannels;
  const std::int64_t tokens = op.batch * op.length, spans = (tokens + kTimeGrain - 1) / kTimeGrain;
  parallel_for(strips * spans, [&](std::int64_t task, std::int64_t) {
    const std::int64_t channel = task % strips * kChannels, begin = task / strips * kTimeGrain;
    const std::int64_t end = std::min(tokens, begin + kTimeGrain);
    const Taps w = load_taps(op.w + channel * op.taps, std::min(kChannels, op.channels - channel), op.taps);
    with_tap_count(op.taps, [&](const auto& taps) {
      for_sequences(op, [&](std::int64_t first, std::int64_t length) {
        const Sequence s = strip_of(op, first, length, channel);
        for (std::int64_t t = std::max<std::int64_t>(0, begin - first); t < std::min(length, end - first);
             ++t) {
          Strip z = convolve(op.x + s.x, s, t, w, taps);
          for (int h = 0; h < 2; ++h) z.half[h] = silu(z.half[h]);
          store_strip(op.y + s.y + t * s.y_stride, z, s.channels);
        }
      });
    });
  });
}

void compute(const CausalConvBackward& op, std::byte*) {
  parallel_for((op.channels + kChannels - 1) / kChannels, [&](std::int64_t task, std::int64_t) {
    const std::int64_t first = task * kChannels, channels = std::min(kChannels, op.channels - first);
    const Taps w = load_taps(op.w + first * op.taps, channels, op.taps);
    Taps d_w{};
    with_tap_count(op.taps, [&](const auto& taps) {
      for_sequences(op, [&](std::int64_t token, std::int64_t length) {
        sequence_backward(op, strip_of(op, token, length, first), w, taps, d_w);
      });
    });
    if (op.d_w == nullptr) return;
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t j = 0; j < op.taps; ++j) {
        op.d_w[(first + c) * op.taps + j] += d_w[static_cast<std::size_t>(j)].half[c / 8][c % 8];
      }
    }
  });
}

}  // namespace terrace::trainer::cpu
