#include "tests/trainer/ops_fixture.hpp"

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

}  // namespace
}  // namespace terrace::trainer
