#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

constexpr auto kNo = Transpose::kNo;
constexpr auto kYes = Transpose::kYes;

class MatmulOps : public OpsUnderTest {};
TERRACE_TEST_ON_EVERY_DEVICE(MatmulOps);

TEST_P(MatmulOps, EveryTransposeAndRaggedShape) {
  const std::int64_t shapes[][3] = {{1, 1, 1},    {1, 37, 5},    {33, 1, 17},
                                    {64, 96, 32}, {130, 47, 61}, {5, 200, 301}};
  std::uint64_t seed = 1;
  for (const auto& [m, n, k] : shapes) {
    for (const Transpose ta : {kNo, kYes}) {
      for (const Transpose tb : {kNo, kYes}) {
        const Values a = random_values(m * k, ++seed), b = random_values(k * n, ++seed);
        const Values before = random_values(m * n, ++seed);
        const Values product = oracle::matmul({m, n, k, ta, tb}, a, b);
        float* c = output(m * n);
        float* added = upload(before);
        ops().run(stream(), Matmul{m, n, k, upload(a), ta, upload(b), tb, c});
        ops().run(stream(), Matmul{m, n, k, upload(a), ta, upload(b), tb, added, Accumulate::kAdd});
        Values sum = product;
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += before[i];
        SCOPED_TRACE(::testing::Message() << m << " x " << n << " x " << k);
        expect_near("overwritten", c, product, kOutput);
        expect_near("added", added, sum, kOutput);
      }
    }
  }
}

TEST_P(MatmulOps, SameBitsAgain) {
  const std::int64_t m = 300, n = 129, k = 257;
  const float* a = upload(random_values(m * k, 1));
  const float* b = upload(random_values(k * n, 2));
  float* c = output(m * n);
  ops().run(stream(), Matmul{m, n, k, a, kNo, b, kNo, c});
  const std::vector<float> first = bench().floats(c, m * n);
  for (int run = 0; run < 5; ++run) {
    float* again = output(m * n);
    ops().run(stream(), Matmul{m, n, k, a, kNo, b, kNo, again});
    EXPECT_TRUE(same_bits(bench().floats(again, m * n), first));
  }
}

// Experts 0, 3 and 4 are empty, 5 has more than half of the rows; the rows past the last offset are NaN.
struct Groups {
  std::int64_t groups = 6, rows = 90, n = 40, k = 24;
  std::vector<std::int32_t> offsets = {0, 0, 7, 20, 20, 20, 81};
};

Values expert_of(const Values& w, const Groups& g, std::int64_t e) {
  return {w.begin() + e * g.n * g.k, w.begin() + (e + 1) * g.n * g.k};
}
Values rows_of(const Values& x, const Groups& g, std::int64_t e, std::int64_t width) {
  const auto at = [&](std::int64_t i) { return x.begin() + g.offsets[static_cast<std::size_t>(i)] * width; };
  return {at(e), at(e + 1)};
}
Values with_garbage(Values x, const Groups& g, std::int64_t width) {
  std::fill(x.begin() + g.offsets.back() * width, x.end(), std::nan(""));
  return x;
}

TEST_P(MatmulOps, GroupedForwardAndInputGradient) {
  const Groups g;
  const Values a = with_garbage(random_values(g.rows * g.k, 1), g, g.k);
  const Values d_c = with_garbage(random_values(g.rows * g.n, 2), g, g.n);
  const Values w = random_values(g.groups * g.n * g.k, 3);
  Values c, d_a;
  for (std::int64_t e = 0; e < g.groups; ++e) {
    const Values in = rows_of(a, g, e, g.k), up = rows_of(d_c, g, e, g.n), weight = expert_of(w, g, e);
    const auto rows = static_cast<std::int64_t>(in.size()) / g.k;
    const Values out = oracle::matmul({rows, g.n, g.k, kNo, kYes}, in, weight);
    const Values back = oracle::matmul({rows, g.k, g.n, kNo, kNo}, up, weight);
    c.insert(c.end(), out.begin(), out.end());
    d_a.insert(d_a.end(), back.begin(), back.end());
  }
  const std::int32_t* offsets = upload(g.offsets);
  float* got_c = output(g.rows * g.n);
  float* got_d_a = output(g.rows * g.k);
  ops().grouped_forward(stream(), {g.groups, g.rows, g.n, g.k, offsets, upload(a), upload(w), got_c});
  ops().grouped_input_gradient(stream(),
                               {g.groups, g.rows, g.n, g.k, offsets, upload(d_c), upload(w), got_d_a});
  expect_near("c", got_c, c, kOutput);
  expect_near("d_a", got_d_a, d_a, kGradient);
  // Rows past the last offset are not written.
  const Values all = bench().download(got_c, g.rows * g.n);
  for (std::size_t i = c.size(); i < all.size(); ++i) ASSERT_TRUE(std::isnan(all[i])) << i;
}

TEST_P(MatmulOps, GroupedWeightGradientIsZeroForEmptyExperts) {
  const Groups g;
  const Values a = with_garbage(random_values(g.rows * g.k, 4), g, g.k);
  const Values d_c = with_garbage(random_values(g.rows * g.n, 5), g, g.n);
  const Values before = random_values(g.groups * g.n * g.k, 6);
  Values d_w, sum;
  for (std::int64_t e = 0; e < g.groups; ++e) {
    const Values in = rows_of(a, g, e, g.k), up = rows_of(d_c, g, e, g.n);
    const auto rows = static_cast<std::int64_t>(in.size()) / g.k;
    const Values part = oracle::matmul({g.n, g.k, rows, kYes, kNo}, up, in);
    d_w.insert(d_w.end(), part.begin(), part.end());
  }
  for (std::size_t i = 0; i < d_w.size(); ++i) sum.push_back(d_w[i] + before[i]);
  const std::int32_t* offsets = upload(g.offsets);
  float* got = output(g.groups * g.n * g.k);
  float* added = upload(before);
  ops().run(stream(),
            GroupedWeightGradient{g.groups, g.rows, g.n, g.k, offsets, upload(d_c), upload(a), got});
  ops().run(stream(), GroupedWeightGradient{g.groups, g.rows, g.n, g.k, offsets, upload(d_c), upload(a),
                                            added, Accumulate::kAdd});
  expect_near("d_w", got, d_w, kGradient);
  expect_near("d_w added", added, sum, kGradient);
  for (const float value : bench().floats(got, g.n * g.k)) ASSERT_EQ(value, 0.0F);
}

TEST_P(MatmulOps, MeasuresItsSpeed) { EXPECT_GT(ops().gemm_flops_per_second(256, 64), 0.0); }

}  // namespace
}  // namespace terrace::trainer
