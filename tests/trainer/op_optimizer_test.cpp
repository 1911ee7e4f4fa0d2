#include "tests/trainer/ops_fixture.hpp"
#include "tests/trainer/oracle_rows.hpp"

namespace terrace::trainer {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

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

TEST_P(OptimizerOps, Bf16GradientAndComputeCopy) {
  for (const std::int64_t count : {1L, 1024L, 1003L}) {
    const Values g = rounded(random_values(count, 1), Dtype::kBf16);
    Values p = random_values(count, 2), m(p.size()), v(p.size());
    const Out gradient = upload(g, Dtype::kBf16), copy = output(count, Dtype::kBf16);
    float *parameter = upload(p), *squares = upload(Values{2.0});
    ops().run(stream(), SumOfSquares{count, gradient, squares});
    expect_near("sum", squares, {2 + inner(g, g)}, 1e-6);
    ops().run(stream(), AdamW{.count = count,
                              .parameter = parameter,
                              .gradient = gradient,
                              .m = zeros(count),
                              .v = zeros(count),
                              .learning_rate = static_cast<float>(kRate),
                              .beta1 = static_cast<float>(kBeta1),
                              .beta2 = static_cast<float>(kBeta2),
                              .eps = static_cast<float>(kEps),
                              .weight_decay = static_cast<float>(kDecay),
                              .step = 1,
                              .sum_of_squares = nullptr,
                              .clip_norm = 0,
                              .compute_copy = copy});
    reference(p, g, m, v, 1, 1.0);
    expect_near("parameter", parameter, p, kOutput);
    expect_near("copy", copy, rounded(bench().download(parameter, count), Dtype::kBf16), 0);
  }
}

TEST_P(OptimizerOps, MuonAgainstTheFormula) {
  struct Case {
    std::int64_t matrices, rows, columns;
    MuonMomentum kind;
    MuonScale scale;
  };
  for (const Case& c : {Case{1, 24, 40, MuonMomentum::kNesterov, MuonScale::kMoonlight},
                        Case{3, 33, 17, MuonMomentum::kNesterov, MuonScale::kJordan},
                        Case{1, 1, 9, MuonMomentum::kPlain, MuonScale::kJordan}}) {
    SCOPED_TRACE(::testing::Message() << c.matrices << " x " << c.rows << " x " << c.columns);
    const std::int64_t each = c.rows * c.columns, count = c.matrices * each;
    Values p = random_values(count, 1), momentum(at(count));
    Muon muon{.matrices = c.matrices,
              .rows = c.rows,
              .columns = c.columns,
              .parameter = upload(p),
              .gradient = nullptr,
              .momentum = zeros(count),
              .learning_rate = 0.02F,
              .momentum_factor = 0.95F,
              .weight_decay = 0.1F,
              .kind = c.kind,
              .scale = c.scale,
              .products = Dtype::kF32,
              .compute_copy = output(count, Dtype::kBf16)};
    DirectScratch scratch(bench().device());
    for (std::uint64_t step = 0; step < 2; ++step) {
      const Values g = random_values(count, 10 + step);
      muon.gradient = upload(g);
      muon_step(ops(), scratch, stream(), muon);
      for (std::int64_t i = 0; i < c.matrices; ++i) {
        const auto part = [&](const Values& all) {
          return Values(all.begin() + i * each, all.begin() + (i + 1) * each);
        };
        Values own = part(momentum);
        const Values after = oracle::muon(muon, part(p), part(g), own);
        std::copy(after.begin(), after.end(), p.begin() + i * each);
        std::copy(own.begin(), own.end(), momentum.begin() + i * each);
      }
    }
    expect_near("momentum", muon.momentum, momentum, kOutput);
    expect_near("parameter", muon.parameter, p, 1e-4);
    expect_near("copy", muon.compute_copy, rounded(bench().download(muon.parameter, count), Dtype::kBf16), 0);
    ASSERT_TRUE(bench().device().synchronize(stream()).ok());
  }
}

TEST_P(OptimizerOps, MuonInBf16StaysNear) {
  const std::int64_t rows = 64, columns = 96, count = rows * columns;
  const Values p(at(count)), g = random_values(count, 2);
  Muon muon{.matrices = 1,
            .rows = rows,
            .columns = columns,
            .parameter = upload(p),
            .gradient = upload(g),
            .momentum = zeros(count),
            .learning_rate = 0.02F,
            .momentum_factor = 0.95F,
            .weight_decay = 0.1F};
  DirectScratch scratch(bench().device());
  muon_step(ops(), scratch, stream(), muon);
  Values momentum(at(count));
  // Five steps of a quintic whose slope at zero is 3.4 carry a rounding of 2^-9 far; singular values near one
  // are pulled back.
  expect_near("parameter", muon.parameter, oracle::muon(muon, p, g, momentum), 5e-2);
  ASSERT_TRUE(bench().device().synchronize(stream()).ok());
  muon.rows = 0;
  EXPECT_THROW(muon_step(ops(), scratch, stream(), muon), std::runtime_error);
}

}  // namespace
}  // namespace terrace::trainer
