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

// One strip of one sequence.
struct Sequence {
  std::int64_t at, length, stride, channels;
};

template <typename Count>
inline Strip convolve(const float* x, const Sequence& s, std::int64_t t, const Taps& w, const Count& taps) {
  Strip z{};
  for_taps(taps, t, [&](std::int64_t j) {
    const Strip row = load_strip(x + (t - taps.count() + 1 + j) * s.stride, s.channels);
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
  const float* x = op.x + s.at;
  for (std::int64_t t = s.length - 1; t >= 0; --t) {
    const Strip z = convolve(x, s, t, w, taps);
    Strip d_z = load_strip(op.d_y + s.at + t * s.stride, s.channels);
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
    store_strip(op.d_x + s.at + t * s.stride, d_x, s.channels);
    for_taps(taps, t, [&](std::int64_t j) {
      const Strip row = load_strip(x + (t - count + 1 + j) * s.stride, s.channels);
      for (int h = 0; h < 2; ++h) d_w[static_cast<std::size_t>(j)].half[h] += d_z.half[h] * row.half[h];
    });
  }
}

void check_taps(std::int64_t taps) {
  if (taps < 1 || taps > kMaxTaps) throw std::runtime_error("causal convolution: taps must be 1 to 16");
}

}  // namespace

// Called when the operator is enqueued, so a bad shape is reported to the caller.
Bytes scratch_bytes(const CausalConv& op) { return check_taps(op.taps), Bytes(); }
Bytes scratch_bytes(const CausalConvBackward& op) { return check_taps(op.taps), Bytes(); }

void compute(const CausalConv& op, std::byte*) {
  const std::int64_t strips = (op.channels + kChannels - 1) / kChannels;
  const std::int64_t spans = (op.length + kTimeGrain - 1) / kTimeGrain;
  parallel_for(strips * op.batch * spans, [&](std::int64_t task, std::int64_t) {
    const std::int64_t first = task % strips * kChannels, batch = task / strips / spans;
    const std::int64_t begin = task / strips % spans * kTimeGrain;
    const std::int64_t channels = std::min(kChannels, op.channels - first);
    const Taps w = load_taps(op.w + first * op.taps, channels, op.taps);
    const Sequence s{batch * op.length * op.channels + first, op.length, op.channels, channels};
    with_tap_count(op.taps, [&](const auto& taps) {
      for (std::int64_t t = begin; t < std::min(op.length, begin + kTimeGrain); ++t) {
        Strip z = convolve(op.x + s.at, s, t, w, taps);
        for (int h = 0; h < 2; ++h) z.half[h] = silu(z.half[h]);
        store_strip(op.y + s.at + t * s.stride, z, channels);
      }
    });
  });
}

void compute(const CausalConvBackward& op, std::byte*) {
  parallel_for((op.channels + kChannels - 1) / kChannels, [&](std::int64_t task, std::int64_t) {
    const std::int64_t first = task * kChannels, channels = std::min(kChannels, op.channels - first);
    const Taps w = load_taps(op.w + first * op.taps, channels, op.taps);
    Taps d_w{};
    with_tap_count(op.taps, [&](const auto& taps) {
      for (std::int64_t b = 0; b < op.batch; ++b) {
        const Sequence s{b * op.length * op.channels + first, op.length, op.channels, channels};
        sequence_backward(op, s, w, taps, d_w);
      }
    });
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t j = 0; j < op.taps; ++j) {
        op.d_w[(first + c) * op.taps + j] += d_w[static_cast<std::size_t>(j)].half[c / 8][c % 8];
      }
    }
  });
}

}  // namespace terrace::trainer::cpu
