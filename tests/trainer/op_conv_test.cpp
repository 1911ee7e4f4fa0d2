#include "tests/trainer/ops_fixture.hpp"
#include "tests/trainer/oracle_rows.hpp"

namespace terrace::trainer {
namespace {

class ConvOps : public OpsUnderTest {};
TERRACE_TEST_ON_EVERY_DEVICE(ConvOps);

// Lengths below the taps, one step, channels that no strip divides, more than one time span.
constexpr oracle::ConvShape kShapes[] = {{1, 1, 1, 4},   {2, 2, 8, 4}, {3, 3, 21, 4},
                                         {2, 37, 24, 4}, {1, 9, 5, 1}, {1, 5, 17, 3}};

TEST_P(ConvOps, ForwardAndBackward) {
  for (const oracle::ConvShape& s : kShapes) {
    SCOPED_TRACE(::testing::Message()
                 << s.batch << " x " << s.length << " x " << s.channels << ", " << s.taps);
    const std::int64_t count = s.batch * s.length * s.channels;
    const Values x = random_values(count, 1), w = random_values(s.channels * s.taps, 2);
    const Values d_y = random_values(count, 3), before = random_values(s.channels * s.taps, 4);
    float* y = output(count);
    ops().run(stream(), CausalConv{s.batch, s.length, s.channels, s.taps, upload(x), upload(w), y});
    expect_near("y", y, oracle::causal_conv(s, x, w), kOutput);
    float* d_x = output(count);
    float* d_w = upload(before);
    ops().run(stream(), CausalConvBackward{s.batch, s.length, s.channels, s.taps, upload(x), upload(w),
                                           upload(d_y), d_x, d_w});
    const auto f = [&](const Values& a, const Values& b) { return inner(d_y, oracle::causal_conv(s, a, b)); };
    expect_near("d_x", d_x, numeric_gradient([&](const Values& at) { return f(at, w); }, x), kGradient);
    Values want = numeric_gradient([&](const Values& at) { return f(x, at); }, w);
    for (std::size_t i = 0; i < want.size(); ++i) want[i] += before[i];
    expect_near("d_w", d_w, want, kGradient);
  }
}

TEST_P(ConvOps, LongSequencesCrossTimeSpans) {
  const oracle::ConvShape s{1, 600, 20, 4};
  const std::int64_t count = s.length * s.channels;
  const Values x = random_values(count, 1), w = random_values(s.channels * s.taps, 2);
  float* y = output(count);
  ops().run(stream(), CausalConv{s.batch, s.length, s.channels, s.taps, upload(x), upload(w), y});
  expect_near("y", y, oracle::causal_conv(s, x, w), kOutput);
}

// All sequence forms at once: the gradient of a whole is that of its sequences.
struct PackedCase {
  oracle::ConvShape shape;  // batch 1
  std::vector<std::int32_t> starts;
  std::int64_t stride;  // of x and y
};
Values strided(const Values& dense, std::int64_t channels, std::int64_t stride) {
  Values out(dense.size() / static_cast<std::size_t>(channels) * static_cast<std::size_t>(stride), 7.0);
  for (std::size_t i = 0; i < dense.size(); ++i) {
    const std::size_t c = static_cast<std::size_t>(channels), s = static_cast<std::size_t>(stride);
    out[i / c * s + i % c] = dense[i];
  }
  return out;
}

// Plain sums in float64: z again, then what each product takes.
Values conv_gradient(const PackedCase& each, const Values& x, const Values& w, const Values& d_y,
                     Values* d_w) {
  const oracle::ConvShape& s = each.shape;
  Values d_x(x.size());
  d_w->assign(w.size(), 0.0);
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (std::size_t i = 0; i + 1 < each.starts.size(); ++i) {
    for (std::int64_t t = each.starts[i]; t < each.starts[i + 1]; ++t) {
      for (std::int64_t c = 0; c < s.channels; ++c) {
        const std::int64_t first = std::max<std::int64_t>(0, s.taps - 1 - (t - each.starts[i]));
        const auto from = [&](std::int64_t j) { return at((t - s.taps + 1 + j) * s.channels + c); };
        double z = 0;
        for (std::int64_t j = first; j < s.taps; ++j) z += w[at(c * s.taps + j)] * x[from(j)];
        const double open = oracle::sigmoid(z);
        const double d_z = d_y[at(t * s.channels + c)] * open * (1 + z * (1 - open));
        for (std::int64_t j = first; j < s.taps; ++j) {
          d_x[from(j)] += w[at(c * s.taps + j)] * d_z;
          (*d_w)[at(c * s.taps + j)] += x[from(j)] * d_z;
        }
      }
    }
  }
  return d_x;
}
Values conv_input_gradient(const PackedCase& each, const Values& x, const Values& w, const Values& d_y) {
  Values d_w;
  return conv_gradient(each, x, w, d_y, &d_w);
}
Values conv_weight_gradient(const PackedCase& each, const Values& x, const Values& w, const Values& d_y) {
  Values d_w;
  (void)conv_gradient(each, x, w, d_y, &d_w);
  return d_w;
}

TEST_P(ConvOps, PackedStridedInBothTypes) {
  const PackedCase kCases[] = {{{1, 9, 8, 4}, {0, 1, 3, 3, 9}, 24},
                               {{1, 150, 132, 4}, {0, 2, 66, 67, 130, 150}, 264},
                               {{1, 70, 12, 3}, {0, 70}, 12},
                               {{1, 40, 7, 4}, {0, 33, 40}, 10},
                               {{1, 20, 8, 7}, {0, 4, 20}, 8},
                               {{1, 530, 4, 2}, {0, 511, 512, 530}, 4},
                               {{1, 660, 260, 4}, {0, 3, 62, 126, 127, 128, 131, 255, 400, 515, 660}, 264}};
  for (const PackedCase& each : kCases) {
    for (const Dtype dtype : kBothTypes) {
      const oracle::ConvShape& s = each.shape;
      SCOPED_TRACE(::testing::Message() << s.length << " x " << s.channels << ", " << name_of(dtype));
      const std::int64_t count = s.length * s.channels;
      const Values x = rounded(random_values(count, 1), dtype), d_y = rounded(random_values(count, 3), dtype);
      const Values w = random_values(s.channels * s.taps, 2);
      const Packing packing{static_cast<std::int64_t>(each.starts.size()) - 1, upload(each.starts)};
      const auto spread = [&](const Values& dense) { return strided(dense, s.channels, each.stride); };
      const Out x_at = upload(spread(x), dtype), d_y_at = upload(spread(d_y), dtype);
      const Out y = upload(spread(Values(x.size())), dtype), d_x = upload(spread(Values(x.size())), dtype);
      ops().run(stream(), CausalConv{s.batch, s.length, s.channels, s.taps, x_at, upload(w), y, packing,
                                     each.stride, each.stride});
      expect_near("y", y, spread(oracle::packed_conv(s, each.starts, x, w)), output_tolerance(dtype));
      float *d_w = zeros(s.channels * s.taps), *again = zeros(s.channels * s.taps);
      const CausalConvBackward backward{s.batch, s.length, s.channels, s.taps,  x_at,        upload(w),
                                        d_y_at,  d_x,      d_w,        packing, each.stride, each.stride};
      ops().run(stream(), backward);
      expect_near("d_x", d_x, spread(conv_input_gradient(each, x, w, d_y)), gradient_tolerance(dtype));
      expect_near("d_w", d_w, conv_weight_gradient(each, x, w, d_y), gradient_tolerance(dtype));
      CausalConvBackward weights_alone = backward;
      weights_alone.d_x = nullptr;
      weights_alone.d_w = again;
      ops().run(stream(), weights_alone);
      expect_same_bits("d_w", d_w, again, s.channels * s.taps);
    }
  }
}

TEST_P(ConvOps, NothingAndBadShapes) {
  float* x = zeros(8);
  ops().run(stream(), CausalConv{2, 0, 4, 4, x, x, x});
  ops().run(stream(), CausalConvBackward{2, 0, 4, 4, x, x, x, x, x});
  EXPECT_THROW(ops().run(stream(), CausalConv{1, 2, 4, 0, x, x, x}), std::runtime_error);
  const Packing packing{1, upload(std::vector<std::int32_t>{0, 1})};
  EXPECT_THROW(ops().run(stream(), CausalConv{2, 1, 4, 4, x, x, x, packing}), std::runtime_error);
}

}  // namespace
}  // namespace terrace::trainer
