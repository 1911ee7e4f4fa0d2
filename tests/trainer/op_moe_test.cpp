#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class MoeOps : public OpsUnderTest {};
TERRACE_TEST_ON_EVERY_DEVICE(MoeOps);

// tokens, experts, top_k, groups, top_groups, scaling
constexpr RouterShape kRouters[] = {{1, 4, 2, 1, 1, 1.0F}, {70, 24, 6, 1, 1, 2.5F},  {50, 16, 4, 4, 2, 2.5F},
                                    {9, 8, 1, 8, 3, 1.0F}, {33, 12, 12, 1, 1, 1.5F}, {20, 12, 6, 3, 3, 1.0F}};

TEST_P(MoeOps, Routes) {
  for (const RouterShape& s : kRouters) {
    SCOPED_TRACE(::testing::Message() << s.experts << " experts, top " << s.top_k << ", groups " << s.groups);
    const Values logits = random_values(s.tokens * s.experts, 1), bias = random_values(s.experts, 2, 0.2);
    const oracle::Routed want = oracle::route(s, logits, bias);
    std::int32_t* expert = bench().int_output(s.tokens * s.top_k);
    float* weight = output(s.tokens * s.top_k);
    ops().run(stream(), Router{s, upload(logits), upload(bias), expert, weight});
    EXPECT_EQ(bench().ints(expert, s.tokens * s.top_k), want.expert);
    expect_near("weight", weight, want.weight, kOutput);
    const Values d_weight = random_values(s.tokens * s.top_k, 3);
    float* d_logits = output(s.tokens * s.experts);
    ops().run(stream(), RouterBackward{s, upload(logits), upload(want.expert), upload(d_weight), d_logits});
    const Values gradient = numeric_gradient(
        [&](const Values& at) { return inner(d_weight, oracle::routed_weights(s, at, want.expert)); },
        logits);
    if (s.top_k == 1) {
      // One weight is always the whole: nothing to learn.
      for (const double value : bench().download(d_logits, s.tokens * s.experts)) EXPECT_NEAR(value, 0, 1e-7);
    } else {
      expect_near("d_logits", d_logits, gradient, kGradient);
    }
  }
}

TEST_P(MoeOps, EqualScoresGoToTheLowerExpert) {
  const RouterShape s{3, 8, 3, 1, 1, 1.0F};
  std::int32_t* expert = bench().int_output(9);
  float* weight = output(9);
  ops().run(stream(), Router{s, zeros(24), zeros(8), expert, weight});
  EXPECT_EQ(bench().ints(expert, 9), (std::vector<std::int32_t>{0, 1, 2, 0, 1, 2, 0, 1, 2}));
}

struct Mapped {
  std::int64_t tokens, experts, top_k;
  std::vector<std::int32_t> expert;
};
// Expert 1 is chosen by nobody.
Mapped mapped() {
  Mapped m{40, 7, 3, random_ints(120, 5, 7)};
  for (std::int32_t& e : m.expert) e = e == 1 ? 4 : e;
  return m;
}

TEST_P(MoeOps, PermutesByCounting) {
  const Mapped m = mapped();
  const std::int64_t rows = m.tokens * m.top_k;
  std::int32_t *offsets = bench().int_output(m.experts + 1), *row = bench().int_output(rows),
               *source = bench().int_output(rows);
  ops().run(stream(), Permute{m.tokens, m.experts, m.top_k, upload(m.expert), offsets, row, source});
  std::vector<std::int32_t> want_offsets{0}, want_source, want_row(m.expert.size());
  for (std::int32_t e = 0; e < m.experts; ++e) {
    for (std::size_t i = 0; i < m.expert.size(); ++i) {
      if (m.expert[i] != e) continue;
      want_row[i] = static_cast<std::int32_t>(want_source.size());
      want_source.push_back(static_cast<std::int32_t>(i));
    }
    want_offsets.push_back(static_cast<std::int32_t>(want_source.size()));
  }
  EXPECT_EQ(bench().ints(offsets, m.experts + 1), want_offsets);
  EXPECT_EQ(bench().ints(row, rows), want_row);
  EXPECT_EQ(bench().ints(source, rows), want_source);

  float* bias = zeros(m.experts);
  ops().run(stream(), BalanceBias{m.experts, 0.01F, offsets, bias});
  Values want_bias;
  for (std::int64_t e = 0; e < m.experts; ++e) {
    const double count =
        want_offsets[static_cast<std::size_t>(e + 1)] - want_offsets[static_cast<std::size_t>(e)];
    const double mean = static_cast<double>(rows) / static_cast<double>(m.experts);
    want_bias.push_back(static_cast<double>(0.01F) * (mean > count ? 1 : mean < count ? -1 : 0));
  }
  expect_near("bias", bias, want_bias, 1e-7);
}

TEST_P(MoeOps, BalanceLeavesEqualLoadsAlone) {
  float* bias = upload(Values{0.5, -0.5});
  ops().run(stream(), BalanceBias{2, 0.01F, upload(std::vector<std::int32_t>{0, 6, 12}), bias});
  expect_near("bias", bias, {0.5, -0.5}, 0);
}

TEST_P(MoeOps, GathersAndSumsRows) {
  const std::int64_t tokens = 13, top_k = 3, width = 21, rows = tokens * top_k;
  std::vector<std::int32_t> row(static_cast<std::size_t>(rows)), source(row.size());
  for (std::int32_t i = 0; i < rows; ++i)
    row[static_cast<std::size_t>(i)] = (i * 7 + 3) % static_cast<std::int32_t>(rows);
  for (std::int32_t i = 0; i < rows; ++i)
    source[static_cast<std::size_t>(row[static_cast<std::size_t>(i)])] = i;
  const Values x = random_values(tokens * width, 1), e = random_values(rows * width, 2);
  const Values weight = random_values(rows, 3), d_out = random_values(tokens * width, 4);
  Values gathered(e.size()), weighted(x.size()), plain(x.size()), d_x(e.size()), d_weight(weight.size());
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::size_t t = i / 3, r = static_cast<std::size_t>(row[i]), w = static_cast<std::size_t>(width);
    for (std::size_t c = 0; c < w; ++c) {
      gathered[r * w + c] = x[t * w + c];
      weighted[t * w + c] += weight[i] * e[r * w + c];
      plain[t * w + c] += e[r * w + c];
      d_x[r * w + c] = weight[i] * d_out[t * w + c];
      d_weight[i] += d_out[t * w + c] * e[r * w + c];
    }
  }
  float *got = output(rows * width), *summed = output(tokens * width), *added = upload(weighted);
  float *got_d_x = output(rows * width), *got_d_weight = output(rows), *unweighted = output(rows * width);
  ops().run(stream(), GatherRows{rows, width, top_k, upload(source), upload(x), got});
  ops().run(stream(), SumRows{tokens, width, top_k, upload(row), upload(weight), upload(e), summed});
  ops().run(stream(),
            SumRows{tokens, width, top_k, upload(row), nullptr, upload(e), added, Accumulate::kAdd});
  ops().run(stream(), SumRowsBackward{tokens, width, top_k, upload(row), upload(weight), upload(e),
                                      upload(d_out), got_d_x, got_d_weight});
  ops().run(stream(), SumRowsBackward{tokens, width, top_k, upload(row), nullptr, upload(e), upload(d_out),
                                      unweighted, nullptr});
  Values both = weighted, ones(e.size());
  for (std::size_t i = 0; i < both.size(); ++i) both[i] += plain[i];
  for (std::size_t i = 0; i < row.size(); ++i) {
    const auto w = static_cast<std::size_t>(width);
    for (std::size_t c = 0; c < w; ++c) ones[static_cast<std::size_t>(row[i]) * w + c] = d_out[i / 3 * w + c];
  }
  expect_near("gathered", got, gathered, 0);
  expect_near("weighted", summed, weighted, kOutput);
  expect_near("added", added, both, kOutput);
  expect_near("d_x", got_d_x, d_x, kGradient);
  expect_near("d_weight", got_d_weight, d_weight, kGradient);
  expect_near("d_x unweighted", unweighted, ones, 0);
}

TEST_P(MoeOps, SituGluAndAdd) {
  const std::int64_t count = 1003;
  const Values g = random_values(count, 1, 5.0), u = random_values(count, 2, 20.0),
               d_y = random_values(count, 3);
  float *y = output(count), *d_g = output(count), *d_u = output(count), *sum = output(count);
  ops().run(stream(), Glu{1, count, GluActivation::kSitu, upload(g), count, upload(u), count, y});
  ops().run(stream(), GluBackward{1, count, GluActivation::kSitu, upload(g), count, upload(u), count,
                                  upload(d_y), d_g, count, d_u, count});
  ops().run(stream(), Add{count, upload(g), upload(u), sum});
  expect_near("y", y, oracle::situ_glu(g, u), kOutput);
  Values want_g, want_u, want_sum;
  for (std::size_t i = 0; i < g.size(); ++i) {
    const auto slope = [&](const Values& a, const Values& b, double h) {
      return (oracle::situ_glu({a[0] + h}, b)[0] - oracle::situ_glu({a[0] - h}, b)[0]) / (2 * h);
    };
    want_g.push_back(d_y[i] * slope({g[i]}, {u[i]}, 1e-5));
    const double up = oracle::situ_glu({g[i]}, {u[i] + 1e-5})[0],
                 down = oracle::situ_glu({g[i]}, {u[i] - 1e-5})[0];
    want_u.push_back(d_y[i] * (up - down) / 2e-5);
    want_sum.push_back(g[i] + u[i]);
  }
  expect_near("d_g", d_g, want_g, kGradient);
  expect_near("d_u", d_u, want_u, kGradient);
  expect_near("sum", sum, want_sum, 1e-7);
  float* again = upload(d_y);  // the gradient makes way for the output
  ops().run(stream(), GluBackward{1, count, GluActivation::kSitu, upload(g), count, upload(u), count, again,
                                  d_g, count, d_u, count, again});
  expect_near("y again", again, oracle::situ_glu(g, u), kOutput);
  expect_near("d_g beside y", d_g, want_g, kGradient);
  ops().run(stream(), Add{count, sum, upload(g), sum});
  for (std::size_t i = 0; i < g.size(); ++i) want_sum[i] += g[i];
  expect_near("in place", sum, want_sum, 1e-7);
}

}  // namespace
}  // namespace terrace::trainer
