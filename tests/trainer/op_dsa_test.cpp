#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class DsaOps : public OpsUnderTest {
 protected:
  static oracle::DsaValues inputs(const DsaShape& s, std::uint64_t seed) {
    const std::int64_t tokens = s.batch * s.length;
    return {.q = random_values(tokens * s.heads * s.key_width, seed + 1),
            .k = random_values(tokens * s.key_width, seed + 2),
            .v = random_values(tokens * s.value_width, seed + 3),
            .gate = random_values(tokens * s.heads * s.value_width, seed + 4),
            .sink = random_values(s.heads, seed + 5),
            .index_q = random_values(tokens * s.index_heads * s.index_width, seed + 6),
            .index_k = random_values(tokens * s.index_width, seed + 7),
            .index_w = random_values(tokens * s.index_heads, seed + 8)};
  }
  DsaInputs to_device(const oracle::DsaValues& in) {
    return {.q = upload(in.q),
            .k = upload(in.k),
            .v = upload(in.v),
            .gate = in.gate.empty() ? nullptr : upload(in.gate),
            .sink = in.sink.empty() ? nullptr : upload(in.sink),
            .index_q = upload(in.index_q),
            .index_k = upload(in.index_k),
            .index_w = upload(in.index_w)};
  }
  DsaBackward backward_op(const DsaShape& s, const DsaInputs& in, const std::vector<std::int32_t>& selected,
                          const Values& d_y) {
    const std::int64_t tokens = s.batch * s.length;
    return {.shape = s,
            .in = in,
            .selected = upload(selected),
            .d_y = upload(d_y),
            .d_q = output(tokens * s.heads * s.key_width),
            .d_k = output(tokens * s.key_width),
            .d_v = output(tokens * s.value_width),
            .d_gate = in.gate == nullptr ? nullptr : output(tokens * s.heads * s.value_width),
            .d_sink = in.sink == nullptr ? nullptr : zeros(s.heads),
            .index_loss_weight = 0.7F,
            .d_index_q = output(tokens * s.index_heads * s.index_width),
            .d_index_k = output(tokens * s.index_width),
            .d_index_w = output(tokens * s.index_heads),
            .index_loss = output(1)};
  }
  void check(const DsaShape& s, const oracle::DsaValues& in, const std::vector<std::int32_t>& selected) {
    SCOPED_TRACE(::testing::Message()
                 << "B " << s.batch << " T " << s.length << " H " << s.heads << " k " << s.top_k);
    const DsaInputs on_device = to_device(in);
    const Values want = oracle::dsa(s, in, selected);
    const auto count = static_cast<std::int64_t>(want.size());
    float* y = output(count);
    ops().run(stream(), Dsa{s, on_device, upload(selected), y});
    expect_near("y", y, want, kOutput);
    const Values d_y = random_values(count, 91);
    const oracle::DsaGradients gradient =
        oracle::dsa_backward(s, in, selected, d_y, static_cast<double>(0.7F));
    const DsaBackward op = backward_op(s, on_device, selected, d_y);
    ops().run(stream(), op);
    expect_near("d_q", op.d_q, gradient.q, kGradient);
    expect_near("d_k", op.d_k, gradient.k, kGradient);
    expect_near("d_v", op.d_v, gradient.v, kGradient);
    if (op.d_gate != nullptr) expect_near("d_gate", op.d_gate, gradient.gate, kGradient);
    if (op.d_sink != nullptr) expect_near("d_sink", op.d_sink, gradient.sink, kGradient);
    expect_near("d_index_q", op.d_index_q, gradient.index_q, kGradient);
    expect_near("d_index_k", op.d_index_k, gradient.index_k, kGradient);
    expect_near("d_index_w", op.d_index_w, gradient.index_w, kGradient);
    expect_near("index_loss", op.index_loss, {gradient.index_loss}, kOutput);
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(DsaOps);

// B T H DK DV HI DI k: one token, more top-k than tokens, heads that no four divide, odd widths, two batches.
constexpr DsaShape kShapes[] = {{1, 1, 1, 8, 8, 1, 8, 4},
                                {2, 5, 3, 12, 20, 2, 10, 8},
                                {1, 40, 4, 32, 24, 2, 16, 8},
                                {3, 33, 5, 16, 16, 3, 8, 12},
                                {2, 70, 4, 64, 64, 4, 32, 20}};

TEST_P(DsaOps, AttentionAndGradients) {
  for (const DsaShape& s : kShapes) {
    const oracle::DsaValues in = inputs(s, 10);
    check(s, in, oracle::dsa_select(s, oracle::dsa_scores(s, in)));
  }
}

TEST_P(DsaOps, WithoutSinkAndGate) {
  DsaShape s{2, 30, 4, 16, 16, 2, 8, 6};
  s.scale = 0.4F;
  oracle::DsaValues in = inputs(s, 20);
  in.sink.clear();
  in.gate.clear();
  check(s, in, oracle::dsa_select(s, oracle::dsa_scores(s, in)));
}

TEST_P(DsaOps, ManyTokensGoInSeveralBlocks) {
  const DsaShape s{2, 200, 2, 16, 16, 2, 8, 10};
  const oracle::DsaValues in = inputs(s, 30);
  check(s, in, oracle::dsa_select(s, oracle::dsa_scores(s, in)));
}

TEST_P(DsaOps, SelectsTheBestAscending) {
  for (const DsaShape& s : kShapes) {
    const oracle::DsaValues in = inputs(s, 40);
    const Values want = oracle::dsa_scores(s, in);
    const std::int64_t tokens = s.batch * s.length;
    std::int32_t* selected = bench().int_output(tokens * s.slots());
    float* scores = output(tokens * s.length);
    ops().run(stream(), DsaSelect{s, to_device(in), selected, scores});
    const Values got = bench().download(scores, tokens * s.length);
    // The selection is exact for the scores that were computed.
    EXPECT_EQ(bench().ints(selected, tokens * s.slots()), oracle::dsa_select(s, got));
    Values past, want_past;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::isinf(got[i]), std::isinf(want[i])) << "only the future is -inf";
      if (std::isinf(want[i])) continue;
      past.push_back(got[i]);
      want_past.push_back(want[i]);
    }
    EXPECT_LE(relative_error(past, want_past), kOutput);
    std::int32_t* without_scores = bench().int_output(tokens * s.slots());
    ops().run(stream(), DsaSelect{s, to_device(in), without_scores});
    EXPECT_EQ(bench().ints(without_scores, tokens * s.slots()), bench().ints(selected, tokens * s.slots()));
  }
}

TEST_P(DsaOps, TiesGoToTheLowerPosition) {
  const DsaShape s{1, 20, 1, 8, 8, 1, 8, 5};
  oracle::DsaValues in = inputs(s, 50);
  // Every product is negative: all scores are zero, some of them negative zeros.
  std::fill(in.index_q.begin(), in.index_q.end(), 1.0);
  std::fill(in.index_k.begin(), in.index_k.end(), -1.0);
  std::int32_t* selected = bench().int_output(s.length * s.slots());
  ops().run(stream(), DsaSelect{s, to_device(in), selected});
  const std::vector<std::int32_t> got = bench().ints(selected, s.length * s.slots());
  for (std::int32_t t = 0; t < s.length; ++t) {
    for (std::int32_t j = 0; j < 5; ++j) EXPECT_EQ(got[static_cast<std::size_t>(t * 5 + j)], j <= t ? j : -1);
  }
}

TEST_P(DsaOps, ARowOfPaddingGivesZeros) {
  const DsaShape s{1, 6, 2, 8, 8, 2, 8, 3};
  const oracle::DsaValues in = inputs(s, 60);
  std::vector<std::int32_t> selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
  for (std::size_t j = 4 * 3; j < 5 * 3; ++j) selected[j] = -1;
  float* y = output(s.length * s.heads * s.value_width);
  ops().run(stream(), Dsa{s, to_device(in), upload(selected), y});
  const Values got = bench().download(y, s.length * s.heads * s.value_width);
  for (std::size_t i = 4 * 16; i < 5 * 16; ++i) EXPECT_EQ(got[i], 0.0);
  const DsaBackward op = backward_op(s, to_device(in), selected, random_values(96, 61));
  ops().run(stream(), op);
  for (const double value : bench().download(op.d_k, s.length * s.key_width))
    EXPECT_TRUE(std::isfinite(value));
  for (std::int64_t i = 0; i < 16; ++i)
    EXPECT_EQ(bench().download(op.d_q + 4 * 16, 16)[static_cast<std::size_t>(i)], 0);
  EXPECT_TRUE(std::isfinite(bench().download(op.index_loss, 1)[0]));
}

TEST_P(DsaOps, TheModelLearnsNothingFromTheIndexLoss) {
  const DsaShape s{1, 25, 2, 16, 16, 2, 8, 6};
  const oracle::DsaValues in = inputs(s, 70);
  const std::vector<std::int32_t> selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
  const DsaInputs on_device = to_device(in);
  const Values zero(static_cast<std::size_t>(s.length * s.heads * s.value_width));
  const DsaBackward op = backward_op(s, on_device, selected, zero);
  ops().run(stream(), op);
  for (const double value : bench().download(op.d_q, s.length * s.heads * s.key_width)) EXPECT_EQ(value, 0);
  for (const double value : bench().download(op.d_k, s.length * s.key_width)) EXPECT_EQ(value, 0);
}

TEST_P(DsaOps, SameBitsAgain) {
  const DsaShape s{2, 150, 4, 32, 32, 2, 16, 24};
  const oracle::DsaValues in = inputs(s, 80);
  const std::vector<std::int32_t> selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
  const DsaInputs on_device = to_device(in);
  const Values d_y = random_values(s.batch * s.length * s.heads * s.value_width, 81);
  const DsaBackward a = backward_op(s, on_device, selected, d_y),
                    b = backward_op(s, on_device, selected, d_y);
  ops().run(stream(), a);
  ops().run(stream(), b);
  const std::int64_t keys = s.batch * s.length * 32;
  EXPECT_TRUE(same_bits(bench().floats(a.d_k, keys), bench().floats(b.d_k, keys)));
  EXPECT_TRUE(same_bits(bench().floats(a.d_v, keys), bench().floats(b.d_v, keys)));
  EXPECT_TRUE(same_bits(bench().floats(a.d_sink, 4), bench().floats(b.d_sink, 4)));
}

}  // namespace
}  // namespace terrace::trainer
