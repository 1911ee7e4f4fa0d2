#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class OptimizerOps : public OpsUnderTest {
 protected:
  static constexpr double kRate = 0.01, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kDecay = 0.1;
  // AdamW as published: decoupled decay, bias-corrected moments.
  static void reference(Values& p, const Values& g, Values& m, Values& v, int step, double clip) {
    for (std::size_t i = 0; i < p.size(); ++i) {
      const double gradient = g[i] * clip;
      m[i] = kBeta1 * m[i] + (1 - kBeta1) * gradient;
      v[i] = kBeta2 * v[i] + (1 - kBeta2) * gradient * gradient;
      const double m_hat = m[i] / (1 - std::pow(kBeta1, step)), v_hat = v[i] / (1 - std::pow(kBeta2, step));
      p[i] -= kRate * (m_hat / (std::sqrt(v_hat) + kEps) + kDecay * p[i]);
    }
  }
  void check(float clip_norm) {
    const std::int64_t count = 1013;
    Values p = random_values(count, 1), m(p.size()), v(p.size());
    float *parameter = upload(p), *first = zeros(count), *second = zeros(count);
    for (int step = 1; step <= 5; ++step) {
      const Values g = random_values(count, static_cast<std::uint64_t>(10 + step), 0.1 * step);
      const double norm = std::sqrt(inner(g, g));
      const double clip = clip_norm > 0 ? std::min(1.0, static_cast<double>(clip_norm) / norm) : 1.0;
      reference(p, g, m, v, step, clip);
      float* gradient = upload(g);
      float* squares = zeros(1);
      ops().run(stream(), SumOfSquares{count, gradient, squares});
      ops().run(stream(), AdamW{.count = count,
                                .parameter = parameter,
                                .gradient = gradient,
                                .m = first,
                                .v = second,
                                .learning_rate = static_cast<float>(kRate),
                                .beta1 = static_cast<float>(kBeta1),
                                .beta2 = static_cast<float>(kBeta2),
                                .eps = static_cast<float>(kEps),
                                .weight_decay = static_cast<float>(kDecay),
                                .step = step,
                                .sum_of_squares = clip_norm > 0 ? squares : nullptr,
                                .clip_norm = clip_norm});
    }
    expect_near("parameter", parameter, p, kOutput);
    expect_near("m", first, m, kOutput);
    expect_near("v", second, v, kOutput);
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(OptimizerOps);

TEST_P(OptimizerOps, AdamWithoutClipping) { check(0); }
TEST_P(OptimizerOps, AdamWithClippingInSomeSteps) { check(7.0F); }

TEST_P(OptimizerOps, SumOfSquaresAddsAndRepeatsItsBits) {
  for (const std::int64_t count : {1L, 7L, 100'003L}) {
    const Values x = random_values(count, 1);
    const float* on_device = upload(x);
    float *a = upload(Values{2.0}), *b = upload(Values{2.0});
    ops().run(stream(), SumOfSquares{count, on_device, a});
    ops().run(stream(), SumOfSquares{count, on_device, b});
    expect_near("sum", a, {2 + inner(x, x)}, 1e-6);
    EXPECT_TRUE(same_bits(bench().floats(a, 1), bench().floats(b, 1)));
  }
}

}  // namespace
}  // namespace terrace::trainer
