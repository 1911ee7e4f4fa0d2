#include <functional>
#include <numeric>

#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

using Lists = std::vector<std::int32_t>;

// Which of its optional parts a case has.
struct Parts {
  bool own_value = true, gate = true, sink = true;
};

class DsaOps : public OpsUnderTest {
 protected:
  static oracle::DsaValues inputs(const DsaShape& s, std::uint64_t seed, Dtype type = Dtype::kF32,
                                  Parts parts = {}) {
    const std::int64_t tokens = s.batch * s.length;
    const auto draw = [&](std::int64_t count, std::uint64_t which) {
      return rounded(random_values(count, seed + which), type);
    };
    return {.q = draw(tokens * s.heads * s.key_width, 1),
            .k = draw(tokens * s.key_width, 2),
            .v = parts.own_value ? draw(tokens * s.value_width, 3) : Values(),
            .gate = parts.gate ? draw(tokens * s.heads * s.value_width, 4) : Values(),
            .sink = parts.sink ? random_values(s.heads, seed + 5) : Values(),
            .index_q = draw(tokens * s.index_heads * s.index_width, 6),
            .index_k = draw(tokens * s.index_width, 7),
            .index_w = draw(tokens * s.index_heads, 8)};
  }
  DsaInputs to_device(const oracle::DsaValues& in, Dtype type = Dtype::kF32) {
    const auto array = [&](const Values& values) {
      return values.empty() ? In(nullptr, type) : In(upload(values, type));
    };
    return {.q = array(in.q),
            .k = array(in.k),
            .v = array(in.v),
            .gate = array(in.gate),
            .sink = in.sink.empty() ? nullptr : upload(in.sink),
            .index_q = array(in.index_q),
            .index_k = array(in.index_k),
            .index_w = array(in.index_w)};
  }
  DsaShape packed(DsaShape s, oracle::DsaValues& in, const Lists& starts) {
    in.starts = starts;
    s.packing = {static_cast<std::int64_t>(starts.size()) - 1, upload(starts)};
    return s;
  }
  DsaBackward backward_op(const DsaShape& s, const DsaInputs& in, const Lists& selected, const Values& d_y) {
    const std::int64_t tokens = s.batch * s.length;
    const Dtype type = in.q.dtype();
    return {.shape = s,
            .in = in,
            .selected = upload(selected),
            .d_y = upload(d_y, type),
            .d_q = output(tokens * s.heads * s.key_width, type),
            .d_k = output(tokens * s.key_width, type),
            .d_v = in.v ? output(tokens * s.value_width, type) : Out(nullptr, type),
            .d_gate = in.gate ? output(tokens * s.heads * s.value_width, type) : Out(nullptr, type),
            .d_sink = in.sink == nullptr ? nullptr : zeros(s.heads),
            .index_loss_weight = 0.7F,
            .d_index_q = output(tokens * s.index_heads * s.index_width, type),
            .d_index_k = output(tokens * s.index_width, type),
            .d_index_w = output(tokens * s.index_heads, type),
            .index_loss = output(1)};
  }
  void expect_gradients(const DsaBackward& op, const oracle::DsaGradients& want) {
    const Dtype type = op.in.q.dtype();
    const double tolerance = gradient_tolerance(type);
    expect_near("d_q", op.d_q, want.q, tolerance);
    expect_near("d_k", op.d_k, want.k, tolerance);
    if (op.d_v) expect_near("d_v", op.d_v, want.v, tolerance);
    if (op.d_gate) expect_near("d_gate", op.d_gate, want.gate, tolerance);
    if (op.d_sink != nullptr) expect_near("d_sink", op.d_sink, want.sink, tolerance);
    if (!op.d_index_q) return;
    expect_near("d_index_q", op.d_index_q, want.index_q, tolerance);
    expect_near("d_index_k", op.d_index_k, want.index_k, tolerance);
    expect_near("d_index_w", op.d_index_w, want.index_w, tolerance);
    expect_near("index_loss", op.index_loss, {want.index_loss}, output_tolerance(type));
  }
  struct Forward {
    Out y, attention;
    float* lse;
  };
  Forward check_forward(const DsaShape& s, const oracle::DsaValues& in, const Lists& selected, Dtype type) {
    SCOPED_TRACE(::testing::Message() << name_of(type) << " B " << s.batch << " T " << s.length << " H "
                                      << s.heads << " DK " << s.key_width << " k " << s.top_k);
    const DsaInputs on_device = to_device(in, type);
    const Values want = oracle::dsa(s, in, selected);
    const oracle::DsaParts parts = oracle::dsa_parts(s, in, selected);
    const auto count = static_cast<std::int64_t>(want.size());
    const Forward got{output(count, type), output(count, type), output(s.batch * s.length * s.heads)};
    ops().run(stream(), Dsa{s, on_device, upload(selected), got.y, got.lse, got.attention});
    expect_near("y", got.y, want, output_tolerance(type));
    expect_near("attention", got.attention, parts.o, output_tolerance(type));
    expect_near("lse", got.lse, parts.lse, output_tolerance(type));
    const Out alone = output(count, type);
    ops().run(stream(), Dsa{s, on_device, upload(selected), alone});
    expect_same_bits("y without the rest", alone, got.y, count);
    return got;
  }
  // Forward, then backward twice: from what the forward kept, and with that computed again.
  void check(const DsaShape& s, const oracle::DsaValues& in, const Lists& selected,
             Dtype type = Dtype::kF32) {
    SCOPED_TRACE(::testing::Message() << name_of(type) << " B " << s.batch << " T " << s.length << " H "
                                      << s.heads << " DK " << s.key_width << " k " << s.top_k);
    const Forward forward = check_forward(s, in, selected, type);
    const DsaInputs on_device = to_device(in, type);
    const std::int64_t count = s.batch * s.length * s.heads * s.value_width;
    const Values d_y = rounded(random_values(count, 91), type);
    const oracle::DsaGradients gradient =
        oracle::dsa_backward(s, in, selected, d_y, static_cast<double>(0.7F));
    DsaBackward op = backward_op(s, on_device, selected, d_y);
    ops().run(stream(), op);
    expect_gradients(op, gradient);
    op = backward_op(s, on_device, selected, d_y);
    op.lse = forward.lse;
    op.attention = forward.attention;
    op.d_index_q = op.d_index_k = op.d_index_w = Out(nullptr, type);
    op.index_loss = nullptr;
    ops().run(stream(), op);
    expect_gradients(op, gradient);
  }
  void check_selected(const DsaShape& s, const oracle::DsaValues& in, Dtype type = Dtype::kF32) {
    check(s, in, oracle::dsa_select(s, oracle::dsa_scores(s, in)), type);
  }
  Lists select(const DsaShape& s, const DsaInputs& in, float* scores = nullptr) {
    std::int32_t* selected = bench().int_output(s.batch * s.length * s.slots());
    ops().run(stream(), DsaSelect{s, in, selected, scores});
    return bench().ints(selected, s.batch * s.length * s.slots());
  }
  // Scores near the oracle's; the selection exact for the scores that were computed, and the same without
  // them.
  void check_selection(const DsaShape& s, const oracle::DsaValues& in, Dtype type) {
    SCOPED_TRACE(::testing::Message() << name_of(type) << " B " << s.batch << " T " << s.length << " HI "
                                      << s.index_heads << " DI " << s.index_width << " k " << s.top_k);
    const DsaInputs on_device = to_device(in, type);
    const Values want = oracle::dsa_scores(s, in);
    float* scores = output(s.batch * s.length * s.length);
    const Lists selected = select(s, on_device, scores);
    const Values got = download(scores, s.batch * s.length * s.length);
    EXPECT_EQ(selected, oracle::dsa_select(s, got));
    Values past, want_past;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(std::isinf(got[i]), std::isinf(want[i])) << "only the future is -inf";
      if (std::isinf(want[i])) continue;
      past.push_back(got[i]);
      want_past.push_back(want[i]);
    }
    EXPECT_LE(relative_error(past, want_past), kOutput);
    EXPECT_EQ(select(s, on_device), selected);
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(DsaOps);

// B T H DK DV HI DI k: one token, more top-k than tokens, heads that no four divide, odd widths, two batches.
constexpr DsaShape kShapes[] = {{1, 1, 1, 8, 8, 1, 8, 4},
                                {2, 5, 3, 12, 20, 2, 10, 8},
                                {1, 40, 4, 32, 24, 2, 16, 8},
                                {3, 33, 5, 16, 16, 3, 8, 12},
                                {2, 70, 4, 64, 64, 4, 32, 20}};
// Those of the matrix units: all heads, part of a tile of slots, several tiles, several turns of tokens; few
// of the keys.
constexpr DsaShape kLatentShapes[] = {{1, 1, 64, 576, 512, 2, 16, 4},
                                      {1, 24, 64, 576, 512, 2, 16, 20},
                                      {2, 65, 2, 576, 512, 2, 16, 200},
                                      {1, 140, 2, 576, 512, 2, 16, 100},
                                      {1, 90, 3, 576, 512, 2, 16, 12}};
constexpr DsaShape kOwnValueShapes[] = {{1, 1, 1, 128, 128, 2, 16, 1},
                                        {1, 40, 64, 128, 128, 2, 16, 20},
                                        {2, 65, 3, 128, 128, 2, 16, 64},
                                        {1, 210, 5, 128, 128, 2, 16, 130}};
// The indexer on the matrix units as well.
constexpr DsaShape kWideIndexShapes[] = {{1, 1, 2, 128, 128, 64, 128, 4},
                                         {2, 65, 2, 128, 128, 64, 128, 33},
                                         {1, 150, 2, 128, 128, 24, 128, 100},
                                         {1, 70, 2, 576, 512, 5, 128, 200}};
// More tokens than the matrix units' backward pass takes in a turn, all heads: keys by blocks, with batch
// rows that turns cut; by blocks, several of them; by rows, as few of the keys are chosen.
constexpr DsaShape kTurnShapes[] = {{9, 58, 64, 128, 128, 2, 16, 12},
                                    {9, 58, 4, 576, 512, 8, 128, 12},
                                    {1, 520, 1, 576, 512, 2, 16, 104},
                                    {1, 520, 64, 128, 128, 8, 128, 8}};
constexpr Parts kLatent{.own_value = false};

TEST_P(DsaOps, AttentionAndGradients) {
  for (const Dtype type : kBothTypes) {
    for (const DsaShape& s : kShapes) check_selected(s, inputs(s, 10, type), type);
  }
}

TEST_P(DsaOps, ValuesInTheKeyRows) {
  for (const DsaShape& s : kLatentShapes)
    check_selected(s, inputs(s, 110, Dtype::kBf16, kLatent), Dtype::kBf16);
  const DsaShape narrow{2, 33, 3, 24, 16, 2, 8, 9};
  for (const Dtype type : kBothTypes) check_selected(narrow, inputs(narrow, 120, type, kLatent), type);
  const DsaShape single{1, 20, 2, 576, 512, 2, 16, 12};
  check_selected(single, inputs(single, 125, Dtype::kF32, kLatent));
}

TEST_P(DsaOps, ValuesOfTheirOwn) {
  for (const DsaShape& s : kOwnValueShapes) check_selected(s, inputs(s, 130, Dtype::kBf16), Dtype::kBf16);
}

// More tokens than multiprocessors and several tiles of slots, all heads or few; some tokens have nothing to
// look at. With the larger scale later logits dwarf earlier ones.
TEST_P(DsaOps, ManyTokensWithLongLists) {
  for (DsaShape s : {DsaShape{1, 160, 64, 576, 512, 2, 16, 140}, DsaShape{1, 600, 2, 576, 512, 2, 16, 150},
                     DsaShape{2, 300, 3, 128, 128, 2, 16, 330}}) {
    const bool latent = s.key_width != s.value_width;
    const oracle::DsaValues in = inputs(s, 150, Dtype::kBf16, {.own_value = !latent});
    Lists selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
    for (std::int64_t token = 7; token < s.batch * s.length; token += 11) {
      std::fill_n(selected.begin() + token * s.slots(), s.slots(), -1);
    }
    if (s.heads < 64) s.scale = latent ? 0.4F : 1.0F;
    check_forward(s, in, selected, Dtype::kBf16);
  }
}

TEST_P(DsaOps, WideIndexersLearn) {
  for (const DsaShape& s : kWideIndexShapes) {
    const Parts parts{.own_value = s.key_width == s.value_width};
    check_selected(s, inputs(s, 140, Dtype::kBf16, parts), Dtype::kBf16);
  }
}

TEST_P(DsaOps, AllHeadsInSeveralTurns) {
  for (const DsaShape& s : kTurnShapes) {
    const Parts parts{.own_value = s.key_width == s.value_width};
    check_selected(s, inputs(s, 150, Dtype::kBf16, parts), Dtype::kBf16);
  }
}

TEST_P(DsaOps, WithoutSinkAndGate) {
  DsaShape s{2, 30, 4, 16, 16, 2, 8, 6};
  s.scale = 0.4F;
  for (const Dtype type : kBothTypes) {
    check_selected(s, inputs(s, 20, type, {.gate = false, .sink = false}), type);
  }
  DsaShape latent = kLatentShapes[2];
  latent.scale = 0.03F;
  const Parts parts{.own_value = false, .gate = false, .sink = false};
  check_selected(latent, inputs(latent, 25, Dtype::kBf16, parts), Dtype::kBf16);
}

TEST_P(DsaOps, ManyTokensGoInSeveralBlocks) {
  const DsaShape s{2, 200, 2, 16, 16, 2, 8, 10};
  check_selected(s, inputs(s, 30));
}

TEST_P(DsaOps, NoTokens) {
  const DsaShape s{1, 0, 64, 576, 512, 8, 128, 16};
  const oracle::DsaValues in = inputs(s, 35, Dtype::kBf16, kLatent);
  const DsaInputs on_device = to_device(in, Dtype::kBf16);
  EXPECT_TRUE(select(s, on_device).empty());
  ops().run(stream(), Dsa{s, on_device, upload(Lists()), output(0, Dtype::kBf16)});
}

TEST_P(DsaOps, PackedSequencesSeeTheirOwnTokens) {
  const Lists starts{0, 7, 7, 8, 40, 150};  // one is empty, one has one token
  for (const Dtype type : kBothTypes) {
    for (const DsaShape& s :
         {DsaShape{1, 150, 2, 128, 128, 8, 128, 12}, DsaShape{1, 150, 3, 16, 12, 3, 10, 40}}) {
      oracle::DsaValues in = inputs(s, 37, type);
      const DsaShape shape = packed(s, in, starts);
      check_selection(shape, in, type);
      check_selected(shape, in, type);
    }
  }
}

TEST_P(DsaOps, SelectsTheBestAscending) {
  for (const Dtype type : kBothTypes) {
    for (const DsaShape& s : kShapes) check_selection(s, inputs(s, 40, type), type);
    for (const DsaShape& s : {DsaShape{1, 1, 1, 8, 8, 64, 128, 4}, DsaShape{2, 65, 1, 8, 8, 64, 128, 20},
                              DsaShape{1, 130, 1, 8, 8, 8, 128, 200}, DsaShape{1, 300, 1, 8, 8, 24, 128, 64},
                              DsaShape{2, 201, 1, 8, 8, 8, 128, 50}, DsaShape{1, 203, 1, 8, 8, 16, 128, 50},
                              DsaShape{1, 195, 1, 8, 8, 32, 128, 50}}) {
      check_selection(s, inputs(s, 45, type), type);
    }
  }
}

TEST_P(DsaOps, LongRowsSelectAsASortDoes) {
  const DsaShape s{1, 1500, 1, 8, 8, 8, 128, 300};
  const oracle::DsaValues in = inputs(s, 47, Dtype::kBf16);
  float* scores = output(s.length * s.length);
  const Lists selected = select(s, to_device(in, Dtype::kBf16), scores);
  for (const std::int64_t t : {0, 299, 300, 301, 777, 1024, 1499}) {
    const Values row = download(scores + t * s.length, s.length);
    Lists order;
    for (std::int32_t p = 0; p <= t; ++p) order.push_back(p);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      return row[static_cast<std::size_t>(a)] > row[static_cast<std::size_t>(b)];
    });
    order.resize(std::min<std::size_t>(order.size(), 300));
    std::sort(order.begin(), order.end());
    order.resize(300, -1);
    EXPECT_EQ(Lists(selected.begin() + t * 300, selected.begin() + (t + 1) * 300), order) << "position " << t;
  }
}

TEST_P(DsaOps, TiesGoToTheLowerPosition) {
  const DsaShape s{1, 20, 1, 8, 8, 1, 8, 5};
  oracle::DsaValues in = inputs(s, 50);
  // Every product is negative: all scores are zero, some of them negative zeros.
  std::fill(in.index_q.begin(), in.index_q.end(), 1.0);
  std::fill(in.index_k.begin(), in.index_k.end(), -1.0);
  const Lists got = select(s, to_device(in));
  for (std::int32_t t = 0; t < s.length; ++t) {
    for (std::int32_t j = 0; j < 5; ++j) EXPECT_EQ(got[static_cast<std::size_t>(t * 5 + j)], j <= t ? j : -1);
  }
}

TEST_P(DsaOps, ManyTiesInLongRows) {
  const DsaShape s{1, 400, 1, 8, 8, 8, 128, 60};
  oracle::DsaValues in = inputs(s, 55, Dtype::kBf16);
  // Whole numbers with few values: sums are exact, and many are equal.
  for (Values* values : {&in.index_q, &in.index_k}) {
    for (double& value : *values) value = value > 1.5 ? 1.0 : 0.0;
  }
  std::fill(in.index_w.begin(), in.index_w.end(), 1.0);
  const Lists want = oracle::dsa_select(s, oracle::dsa_scores(s, in));
  for (const Dtype type : kBothTypes) EXPECT_EQ(select(s, to_device(in, type)), want) << name_of(type);
}

// Row 4 has nothing to look at.
TEST_P(DsaOps, ARowOfPaddingGivesZeros) {
  for (const Dtype type : kBothTypes) {
    for (const DsaShape& s : {DsaShape{1, 6, 2, 8, 8, 2, 8, 3}, DsaShape{1, 6, 2, 576, 512, 2, 8, 3},
                              DsaShape{1, 6, 2, 128, 128, 2, 8, 3}}) {
      const oracle::DsaValues in = inputs(s, 60, type, {.own_value = s.key_width == s.value_width});
      Lists selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
      for (std::size_t j = 4 * 3; j < 5 * 3; ++j) selected[j] = -1;
      const std::int64_t row = s.heads * s.value_width;
      const Out y = output(s.length * row, type);
      float* lse = output(s.length * s.heads);
      ops().run(stream(), Dsa{s, to_device(in, type), upload(selected), y, lse});
      const Values got = download(y, s.length * row);
      for (std::int64_t i = 4 * row; i < 5 * row; ++i) EXPECT_EQ(got[static_cast<std::size_t>(i)], 0.0);
      // The sink alone.
      EXPECT_NEAR(download(lse + 4 * s.heads, 1)[0], in.sink[0], 1e-5);
      const DsaBackward op =
          backward_op(s, to_device(in, type), selected, rounded(random_values(s.length * row, 61), type));
      ops().run(stream(), op);
      for (const double value : download(op.d_k, s.length * s.key_width)) ASSERT_TRUE(std::isfinite(value));
      const Values d_q = download(op.d_q, s.length * s.heads * s.key_width);
      for (std::int64_t i = 4 * s.heads * s.key_width; i < 5 * s.heads * s.key_width; ++i) {
        ASSERT_EQ(d_q[static_cast<std::size_t>(i)], 0.0);
      }
      for (const double value : download(op.d_sink, s.heads)) EXPECT_TRUE(std::isfinite(value));
      EXPECT_TRUE(std::isfinite(download(op.index_loss, 1)[0]));
    }
  }
}

TEST_P(DsaOps, PaddingAloneWithoutASink) {
  const DsaShape s{1, 2, 2, 576, 512, 2, 8, 2};
  for (const Dtype type : kBothTypes) {
    const oracle::DsaValues in = inputs(s, 65, type, {.own_value = false, .gate = true, .sink = false});
    const Out y = output(s.length * 1024, type);
    float* lse = output(s.length * s.heads);
    ops().run(stream(), Dsa{s, to_device(in, type), upload(Lists(4, -1)), y, lse});
    for (const double value : download(y, s.length * 1024)) ASSERT_EQ(value, 0.0);
    for (const double value : download(lse, 4)) EXPECT_EQ(value, -std::numeric_limits<double>::infinity());
    const DsaBackward op =
        backward_op(s, to_device(in, type), Lists(4, -1), random_values(s.length * 1024, 66));
    ops().run(stream(), op);
    for (const double value : download(op.d_k, s.length * s.key_width)) ASSERT_EQ(value, 0.0);
    EXPECT_EQ(download(op.index_loss, 1)[0], 0.0);
  }
}

TEST_P(DsaOps, TheModelLearnsNothingFromTheIndexLoss) {
  const DsaShape s{1, 25, 2, 16, 16, 2, 8, 6};
  const oracle::DsaValues in = inputs(s, 70);
  const Lists selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
  const Values zero(static_cast<std::size_t>(s.length * s.heads * s.value_width));
  const DsaBackward op = backward_op(s, to_device(in), selected, zero);
  ops().run(stream(), op);
  for (const double value : download(op.d_q, s.length * s.heads * s.key_width)) EXPECT_EQ(value, 0);
  for (const double value : download(op.d_k, s.length * s.key_width)) EXPECT_EQ(value, 0);
}

TEST_P(DsaOps, SameBitsAgain) {
  struct Case {
    DsaShape shape;
    Dtype type;
    Parts parts;
  };
  for (const Case& each : {Case{{2, 150, 4, 32, 32, 2, 16, 24}, Dtype::kF32, {}},
                           Case{{1, 140, 8, 576, 512, 8, 128, 90}, Dtype::kBf16, kLatent},
                           Case{{1, 140, 8, 128, 128, 8, 128, 12}, Dtype::kBf16, {}},
                           Case{{2, 70, 8, 128, 128, 2, 16, 40}, Dtype::kBf16, {}}}) {
    const DsaShape& s = each.shape;
    const oracle::DsaValues in = inputs(s, 80, each.type, each.parts);
    const Lists selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
    const DsaInputs on_device = to_device(in, each.type);
    const Values d_y = rounded(random_values(s.batch * s.length * s.heads * s.value_width, 81), each.type);
    const DsaBackward a = backward_op(s, on_device, selected, d_y),
                      b = backward_op(s, on_device, selected, d_y);
    ops().run(stream(), a);
    ops().run(stream(), b);
    const std::int64_t tokens = s.batch * s.length;
    expect_same_bits("d_q", a.d_q, b.d_q, tokens * s.heads * s.key_width);
    expect_same_bits("d_k", a.d_k, b.d_k, tokens * s.key_width);
    if (a.d_v) expect_same_bits("d_v", a.d_v, b.d_v, tokens * s.value_width);
    expect_same_bits("d_sink", a.d_sink, b.d_sink, s.heads);
    expect_same_bits("d_index_k", a.d_index_k, b.d_index_k, tokens * s.index_width);
  }
}

TEST_P(DsaOps, IndicesComeBackFromTheirShortForm) {
  // Form, rows of random lists: empty, full, in between; positions up to the last.
  for (const IndexLists& lists :
       {IndexLists{20, 5, 65535}, IndexLists{20, 5, 65536}, IndexLists{20, 1, 65535},
        IndexLists{20, 1, 65536}, IndexLists{20, 5, 70000}, IndexLists{40, 300, 2000},
        IndexLists{40, 100, 100}, IndexLists{7, 600, 9001}}) {
    Lists selected;
    for (std::int64_t row = 0; row < lists.rows; ++row) {
      const std::int64_t count = row == 0 ? 0 : row == 1 ? lists.slots : (row * 37) % (lists.slots + 1);
      Lists list = random_ints(3 * count, static_cast<std::uint64_t>(row + lists.slots),
                               static_cast<std::int32_t>(lists.length));
      if (row % 3 == 1) list.push_back(static_cast<std::int32_t>(lists.length - 1));
      if (row % 4 == 1) list.push_back(0);
      std::sort(list.begin(), list.end());
      list.erase(std::unique(list.begin(), list.end()), list.end());
      if (static_cast<std::int64_t>(list.size()) > count) list.erase(list.begin(), list.end() - count);
      list.resize(static_cast<std::size_t>(lists.slots), -1);
      selected.insert(selected.end(), list.begin(), list.end());
    }
    const std::int64_t words = (packed_index_bytes(lists) + 3) / 4;
    auto* packed = reinterpret_cast<std::byte*>(bench().int_output(words));
    ops().run(stream(), PackIndices{lists, upload(selected), packed});
    std::int32_t* back = bench().int_output(lists.rows * lists.slots);
    ops().run(stream(), UnpackIndices{lists, packed, back});
    EXPECT_EQ(bench().ints(back, lists.rows * lists.slots), selected)
        << "slots " << lists.slots << " length " << lists.length;
  }
}

// Every position up to each token's own, of its sequence.
Lists all_causal(const DsaShape& s, const Lists& starts = {}) {
  Lists lists(static_cast<std::size_t>(s.batch * s.length * s.length), -1);
  for (std::int64_t token = 0; token < s.batch * s.length; ++token) {
    const auto t = static_cast<std::int32_t>(token % s.length);
    std::int32_t start = 0;
    for (const std::int32_t each : starts) start = each <= t ? each : start;
    std::iota(lists.begin() + token * s.length, lists.begin() + token * s.length + (t + 1 - start), start);
  }
  return lists;
}

// Shapes without lists: any, and those of the matrix units, in several turns.
constexpr DsaShape kDenseShapes[] = {{1, 1, 1, 8, 8, 1, 8, 4},
                                     {2, 37, 3, 12, 20, 2, 10, 100},
                                     {1, 70, 3, 128, 128, 8, 128, 70},
                                     {2, 100, 2, 576, 512, 8, 128, 100}};

TEST_P(DsaOps, WithoutListsAllTokensAreLookedAt) {
  for (const Dtype type : kBothTypes) {
    for (const DsaShape& s : kDenseShapes) {
      const oracle::DsaValues in = inputs(s, 160, type, {.own_value = s.key_width != 576});
      const Lists lists = all_causal(s);
      check(s, in, lists, type);
      const DsaInputs on_device = to_device(in, type);
      const std::int64_t tokens = s.batch * s.length, count = tokens * s.heads * s.value_width;
      const Out given = output(count, type), none = output(count, type);
      ops().run(stream(), Dsa{s, on_device, upload(lists), given});
      ops().run(stream(), Dsa{s, on_device, nullptr, none});
      expect_same_bits("y", none, given, count);
      const Values d_y = rounded(random_values(count, 161), type);
      const DsaBackward a = backward_op(s, on_device, lists, d_y);
      DsaBackward b = backward_op(s, on_device, lists, d_y);
      b.selected = nullptr;
      ops().run(stream(), a);
      ops().run(stream(), b);
      expect_same_bits("d_q", b.d_q, a.d_q, tokens * s.heads * s.key_width);
      expect_same_bits("d_k", b.d_k, a.d_k, tokens * s.key_width);
      expect_same_bits("d_index_k", b.d_index_k, a.d_index_k, tokens * s.index_width);
    }
  }
}

TEST_P(DsaOps, WithoutListsPackedSequencesSeeTheirOwnTokens) {
  const Lists starts{0, 7, 7, 8, 40, 90};
  for (const Dtype type : kBothTypes) {
    for (const DsaShape& s :
         {DsaShape{1, 90, 2, 128, 128, 8, 128, 90}, DsaShape{1, 90, 3, 16, 12, 3, 10, 90}}) {
      oracle::DsaValues in = inputs(s, 165, type);
      const DsaShape shape = packed(s, in, starts);
      const Values want = oracle::dsa(shape, in, all_causal(s, starts));
      const Out y = output(static_cast<std::int64_t>(want.size()), type);
      ops().run(stream(), Dsa{shape, to_device(in, type), nullptr, y});
      expect_near("y", y, want, output_tolerance(type));
    }
  }
}

// What a warm-up asks for: attention over all tokens teaches the indexer, and nothing else is computed.
TEST_P(DsaOps, TheIndexerAloneLearnsFromAllTokens) {
  for (const Dtype type : kBothTypes) {
    for (const DsaShape& s : kDenseShapes) {
      const oracle::DsaValues in = inputs(s, 170, type, {.own_value = s.key_width != 576});
      const std::int64_t tokens = s.batch * s.length;
      const Values no_gradient(static_cast<std::size_t>(tokens * s.heads * s.value_width), 0.0);
      const oracle::DsaGradients want =
          oracle::dsa_backward(s, in, all_causal(s), no_gradient, static_cast<double>(0.7F));
      float* lse = output(tokens * s.heads);
      const DsaInputs on_device = to_device(in, type);
      ops().run(stream(), Dsa{.shape = s,
                              .in = on_device,
                              .selected = nullptr,
                              .y = output(tokens * s.heads * s.value_width, type),
                              .lse = lse});
      for (const float* kept : {static_cast<const float*>(lse), static_cast<const float*>(nullptr)}) {
        DsaBackward op = backward_op(s, on_device, {}, no_gradient);
        op.selected = nullptr;
        op.d_y = nullptr;
        op.d_q = op.d_k = op.d_v = op.d_gate = nullptr;
        op.d_sink = nullptr;
        op.lse = kept;
        ops().run(stream(), op);
        const double tolerance = gradient_tolerance(type);
        expect_near("d_index_q", op.d_index_q, want.index_q, tolerance);
        expect_near("d_index_k", op.d_index_k, want.index_k, tolerance);
        expect_near("d_index_w", op.d_index_w, want.index_w, tolerance);
        expect_near("index_loss", op.index_loss, {want.index_loss}, output_tolerance(type));
      }
    }
  }
}

// Word by word what the lists say; and a backward pass that is given the map has the bits of one that isn't.
TEST_P(DsaOps, AMapOfKeysServesTheBackwardPass) {
  for (const DsaShape& s : {DsaShape{2, 40, 3, 12, 20, 2, 10, 7}, DsaShape{2, 530, 2, 128, 128, 8, 128, 110},
                            DsaShape{1, 300, 2, 576, 512, 8, 128, 64}, DsaShape{1, 1, 1, 8, 8, 1, 8, 1}}) {
    const Dtype type = s.key_width >= 128 ? Dtype::kBf16 : Dtype::kF32;
    const oracle::DsaValues in = inputs(s, 180, type, {.own_value = s.key_width != 576});
    Lists selected = oracle::dsa_select(s, oracle::dsa_scores(s, in));
    if (s.length > 20) std::fill_n(selected.begin() + 20 * s.slots(), s.slots(), -1);
    const std::int64_t tokens = s.batch * s.length, words = key_map_words(s.length);
    std::int32_t* map = bench().int_output(tokens * words * 2);
    ops().run(stream(), MapKeys{s, upload(selected), reinterpret_cast<KeyWord*>(map)});
    const Lists got = bench().ints(map, tokens * words * 2);
    for (std::int64_t token = 0; token < tokens; ++token) {
      std::int64_t slot = 0;
      for (std::int64_t word = 0; word * 32 < s.length; ++word) {
        const auto at = static_cast<std::size_t>((token * words + word) * 2);
        ASSERT_EQ(got[at + 1], slot) << "token " << token << " word " << word;
        std::uint32_t bits = 0;
        for (; slot < s.slots(); ++slot) {
          const std::int32_t position = selected[static_cast<std::size_t>(token * s.slots() + slot)];
          if (position < 0 || position / 32 != word) break;
          bits |= 1U << (position % 32);
        }
        ASSERT_EQ(static_cast<std::uint32_t>(got[at]), bits) << "token " << token << " word " << word;
      }
    }
    const DsaInputs on_device = to_device(in, type);
    const Values d_y = rounded(random_values(tokens * s.heads * s.value_width, 181), type);
    const DsaBackward a = backward_op(s, on_device, selected, d_y);
    DsaBackward b = backward_op(s, on_device, selected, d_y);
    b.key_map = reinterpret_cast<const KeyWord*>(map);
    ops().run(stream(), a);
    ops().run(stream(), b);
    expect_same_bits("d_k", b.d_k, a.d_k, tokens * s.key_width);
    expect_same_bits("d_index_k", b.d_index_k, a.d_index_k, tokens * s.index_width);
    if (a.d_v) expect_same_bits("d_v", b.d_v, a.d_v, tokens * s.value_width);
  }
}

TEST(DsaIndices, TakeTheSmallerForm) {
  EXPECT_EQ(index_form({1, 2048, 8192}), IndexForm::kBitmap);
  EXPECT_EQ(packed_index_bytes({3, 2048, 8192}), 3 * 1024);
  EXPECT_EQ(index_form({1, 2048, 65536}), IndexForm::kShortList);
  EXPECT_EQ(packed_index_bytes({3, 2048, 65536}), 3 * 4096);
  EXPECT_EQ(index_form({1, 1, 65536}), IndexForm::kList);
  EXPECT_EQ(index_form({1, 2048, 262144}), IndexForm::kList);
  EXPECT_EQ(index_form({1, 100000, 1000000}), IndexForm::kBitmap);
  EXPECT_EQ(packed_index_bytes({0, 2048, 8192}), 0);
}

}  // namespace
}  // namespace terrace::trainer
