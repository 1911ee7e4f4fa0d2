#include <utility>

#include "tests/trainer/ops_fixture.hpp"
#include "tests/trainer/oracle_attention.hpp"

namespace terrace::trainer {
namespace {

// A dense (tokens, heads, width) array inside rows that are further apart.
struct Layout {
  std::int64_t tokens, heads, width;
  RowStride rows;
  [[nodiscard]] std::int64_t extent() const {
    return tokens == 0 ? 0 : (tokens - 1) * rows.token + (heads - 1) * rows.head + width;
  }
  template <typename Visit>
  void each(Visit visit) const {  // visit(place in the dense array, place in the wide one)
    std::int64_t dense = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t c = 0; c < width; ++c) visit(dense++, t * rows.token + h * rows.head + c);
      }
    }
  }
  [[nodiscard]] Values spread(const Values& dense) const {
    Values wide(static_cast<std::size_t>(extent()), std::nan(""));
    each([&](std::int64_t from, std::int64_t to) {
      wide[static_cast<std::size_t>(to)] = dense[static_cast<std::size_t>(from)];
    });
    return wide;
  }
};

class AttentionOps : public OpsUnderTest {
 protected:
  struct Case {
    AttentionShape shape;
    std::vector<std::int32_t> starts;
    bool sink = false;
  };
  static Case with_sink(Case c) {
    c.sink = true;
    return c;
  }
  struct OnDevice {
    Attention forward;
    AttentionBackward backward;
  };

  static oracle::AttentionValues inputs(const Case& c, Dtype dtype) {
    const AttentionShape& s = c.shape;
    const std::int64_t tokens = s.batch * s.length;
    return {.q = rounded(random_values(tokens * s.heads * s.key_width, 1), dtype),
            .k = rounded(random_values(tokens * s.key_heads * s.key_width, 2), dtype),
            .v = rounded(random_values(tokens * s.key_heads * s.value_width, 3), dtype),
            .sink = c.sink ? random_values(s.heads, 4) : Values(),
            .starts = c.starts};
  }
  static Layout q_layout(const AttentionShape& s) {
    return {s.batch * s.length, s.heads, s.key_width, s.q_rows()};
  }
  static Layout k_layout(const AttentionShape& s) {
    return {s.batch * s.length, s.key_heads, s.key_width, s.k_rows()};
  }
  static Layout v_layout(const AttentionShape& s) {
    return {s.batch * s.length, s.key_heads, s.value_width, s.v_rows()};
  }
  static Values output_gradient(const AttentionShape& s, Dtype dtype) {
    return rounded(random_values(s.batch * s.length * s.heads * s.value_width, 5), dtype);
  }

  OnDevice to_device(Case c, const oracle::AttentionValues& in, Dtype dtype) {
    AttentionShape& s = c.shape;
    if (!c.starts.empty()) {
      s.packing = {static_cast<std::int64_t>(c.starts.size()) - 1, upload(c.starts)};
    }
    const std::int64_t rows = s.batch * s.length * s.heads;
    OnDevice ops{};
    ops.forward = {.shape = s,
                   .q = upload(q_layout(s).spread(in.q), dtype),
                   .k = upload(k_layout(s).spread(in.k), dtype),
                   .v = upload(v_layout(s).spread(in.v), dtype),
                   .sink = in.sink.empty() ? nullptr : upload(in.sink),
                   .o = output(rows * s.value_width, dtype),
                   .lse = output(rows)};
    ops.backward = {.shape = s,
                    .q = ops.forward.q,
                    .k = ops.forward.k,
                    .v = ops.forward.v,
                    .sink = ops.forward.sink,
                    .o = ops.forward.o,
                    .lse = ops.forward.lse,
                    .d_o = upload(output_gradient(s, dtype), dtype),
                    .d_q = output(q_layout(s).extent(), dtype),
                    .d_k = output(k_layout(s).extent(), dtype),
                    .d_v = output(v_layout(s).extent(), dtype),
                    .d_sink = in.sink.empty() ? nullptr : upload(Values(in.sink.size(), 0.25))};
    return ops;
  }

  // The rows are near, and what is between them is as it was: NaN.
  void expect_rows(const char* what, const Layout& layout, In got, const Values& want, double tolerance) {
    const Values wide = download(got, layout.extent());
    Values rows;
    std::vector<char> row_at(wide.size());
    layout.each([&](std::int64_t, std::int64_t at) {
      rows.push_back(wide[static_cast<std::size_t>(at)]);
      row_at[static_cast<std::size_t>(at)] = 1;
    });
    EXPECT_LE(relative_error(rows, want), tolerance) << what;
    for (std::size_t i = 0; i < wide.size(); ++i) {
      ASSERT_TRUE(row_at[i] != 0 || std::isnan(wide[i])) << what << " between rows, at " << i;
    }
  }

  void check(const Case& c, Dtype dtype) {
    const AttentionShape& s = c.shape;
    SCOPED_TRACE(::testing::Message()
                 << name_of(dtype) << " B " << s.batch << " T " << s.length << " H " << s.heads << '/'
                 << s.key_heads << " widths " << s.key_width << '/' << s.value_width << " window " << s.window
                 << " sequences " << c.starts.size() << (c.sink ? " sink" : ""));
    const oracle::AttentionValues in = inputs(c, dtype);
    const OnDevice on_device = to_device(c, in, dtype);
    const oracle::AttentionResult want = oracle::attention(s, in);
    ops().run(stream(), on_device.forward);
    expect_near("o", on_device.forward.o, want.o, output_tolerance(dtype));
    expect_near("lse", on_device.forward.lse, want.lse, output_tolerance(dtype));
    const oracle::AttentionGradients gradient = oracle::attention_backward(s, in, output_gradient(s, dtype));
    ops().run(stream(), on_device.backward);
    const double tolerance = gradient_tolerance(dtype);
    expect_rows("d_q", q_layout(s), on_device.backward.d_q, gradient.q, tolerance);
    expect_rows("d_k", k_layout(s), on_device.backward.d_k, gradient.k, tolerance);
    expect_rows("d_v", v_layout(s), on_device.backward.d_v, gradient.v, tolerance);
    if (!c.sink) return;
    Values d_sink = gradient.sink;
    for (double& value : d_sink) value += 0.25;  // adds to what was there
    expect_near("d_sink", on_device.backward.d_sink, d_sink, tolerance);
  }
  void check(const Case& c) {
    for (const Dtype dtype : kBothTypes) check(c, dtype);
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(AttentionOps);

AttentionShape shape_of(std::int64_t length, std::pair<int, int> heads, std::pair<int, int> widths) {
  return {.batch = 1,
          .length = length,
          .heads = heads.first,
          .key_heads = heads.second,
          .key_width = widths.first,
          .value_width = widths.second};
}

// The oracle's own gradient is that of its forward function.
TEST(AttentionOracle, GradientIsNumeric) {
  AttentionShape s = shape_of(7, {2, 1}, {4, 3});
  s.window = 3;
  oracle::AttentionValues in{random_values(7 * 2 * 4, 11),
                             random_values(7 * 4, 12),
                             random_values(7 * 3, 13),
                             random_values(2, 14),
                             {0, 2, 2, 7}};
  const Values d_o = random_values(7 * 2 * 3, 15);
  const oracle::AttentionGradients got = oracle::attention_backward(s, in, d_o);
  const std::pair<Values oracle::AttentionValues::*, const Values*> parts[] = {
      {&oracle::AttentionValues::q, &got.q},
      {&oracle::AttentionValues::k, &got.k},
      {&oracle::AttentionValues::v, &got.v},
      {&oracle::AttentionValues::sink, &got.sink}};
  for (const auto& [member, gradient] : parts) {
    const auto loss = [&, member = member](const Values& x) {
      oracle::AttentionValues changed = in;
      changed.*member = x;
      return inner(oracle::attention(s, changed).o, d_o);
    };
    EXPECT_LE(relative_error(*gradient, numeric_gradient(loss, in.*member)), 1e-8);
  }
}

TEST_P(AttentionOps, EveryLengthAroundABlock) {
  for (const std::int64_t length : {1, 2, 63, 64, 65, 127, 128, 129, 130, 257}) {
    check({shape_of(length, {2, 2}, {16, 16}), {}});
  }
}

// Those with kernels of their own, small ones, and odd ones.
TEST_P(AttentionOps, EveryWidth) {
  for (const auto& widths :
       {std::pair(64, 64), {128, 128}, {192, 128}, {48, 32}, {20, 36}, {7, 5}, {256, 256}, {128, 64}}) {
    check({shape_of(130, {2, 1}, widths), {}});
  }
}

TEST_P(AttentionOps, KernelsOfTheirOwnAtSeveralLengths) {
  for (const std::int64_t length : {1, 64, 257, 300}) {
    check({shape_of(length, {2, 2}, {64, 64}), {}}, Dtype::kBf16);
    check({shape_of(length, {2, 1}, {128, 128}), {}}, Dtype::kBf16);
    check({shape_of(length, {1, 1}, {192, 128}), {}}, Dtype::kBf16);
  }
}

TEST_P(AttentionOps, GroupsOfHeads) {
  check({shape_of(130, {4, 2}, {16, 16}), {}});
  check({shape_of(65, {8, 1}, {16, 16}), {}});
  check({shape_of(130, {4, 2}, {64, 64}), {}});
  check({shape_of(65, {8, 1}, {128, 128}), {}}, Dtype::kBf16);
}

TEST_P(AttentionOps, BatchesDoNotMix) {
  for (const auto& widths : {std::pair(16, 16), {64, 64}, {128, 128}, {192, 128}}) {
    AttentionShape s = shape_of(70, {2, 1}, widths);
    s.batch = 3;
    s.scale = 0.2F;
    check({s, {}});
  }
}

TEST_P(AttentionOps, SinkTakesItsShare) {
  check(with_sink({shape_of(65, {3, 3}, {16, 16}), {}}));
  check(with_sink({shape_of(140, {2, 1}, {64, 64}), {}}));
  check(with_sink({shape_of(140, {2, 2}, {192, 128}), {}}), Dtype::kBf16);
}

TEST_P(AttentionOps, WindowLimitsTheReach) {
  for (const std::int64_t window : {1, 17, 64, 100, 1000}) {
    for (const auto& widths : {std::pair(16, 16), {64, 64}}) {
      AttentionShape s = shape_of(200, {2, 1}, widths);
      s.window = window;
      check({s, {}});
    }
    AttentionShape s = shape_of(300, {1, 1}, {128, 128});
    s.window = window;
    check({s, {}}, Dtype::kBf16);
  }
}

TEST_P(AttentionOps, PackedSequencesDoNotMix) {
  const std::vector<std::int32_t> starts = {0, 0, 1, 1, 2, 70, 70, 198, 203, 270, 270};
  for (const auto& widths : {std::pair(16, 16), {48, 32}, {64, 64}, {192, 128}}) {
    check({shape_of(270, {2, 1}, widths), starts});
  }
  AttentionShape s = shape_of(270, {2, 2}, {128, 128});
  s.window = 50;
  check(with_sink({s, starts}));
}

TEST_P(AttentionOps, SlicesOfAFusedProjection) {
  for (const auto& widths : {std::pair(16, 16), {64, 64}, {192, 128}}) {
    AttentionShape s = shape_of(70, {4, 2}, widths);
    s.batch = 2;
    const std::int64_t dk = widths.first, dv = widths.second;
    s.q_stride = {.token = 4 * dk + 2 * dk + 2 * dv};  // [q | k | v]
    s.k_stride = {.token = 2 * (dk + 8 + dv), .head = dk + 8 + dv};
    s.v_stride = {.token = 2 * 2 * dv, .head = 2 * dv};  // [key | value] a head
    check({s, {}});
    // Rows that no tensor copy can reach.
    s.q_stride = {.token = 4 * dk + 3};
    s.v_stride = {.token = 2 * dv + 1};
    check({s, {}}, Dtype::kBf16);
  }
}

TEST_P(AttentionOps, LargeLogitsStayFinite) {
  Case c = with_sink({shape_of(130, {2, 1}, {64, 64}), {}});
  c.shape.scale = 30.0F;
  for (const Dtype dtype : kBothTypes) {
    const oracle::AttentionValues in = inputs(c, dtype);
    const OnDevice on_device = to_device(c, in, dtype);
    ops().run(stream(), on_device.forward);
    // A logit of thousands is known to a few thousandths in fp32.
    expect_near("o", on_device.forward.o, oracle::attention(c.shape, in).o, 1e-2);
  }
}

TEST_P(AttentionOps, TheSameBitsTwice) {
  for (const Dtype dtype : kBothTypes) {
    for (const auto& widths : {std::pair(48, 32), {64, 64}, {128, 128}, {192, 128}}) {
      const Case c = with_sink({shape_of(150, {2, 1}, widths), {}});
      const AttentionShape& s = c.shape;
      const oracle::AttentionValues in = inputs(c, dtype);
      const OnDevice a = to_device(c, in, dtype), b = to_device(c, in, dtype);
      for (const OnDevice* run : {&a, &b}) {
        ops().run(stream(), run->forward);
        ops().run(stream(), run->backward);
      }
      expect_same_bits("o", a.forward.o, b.forward.o, s.length * s.heads * s.value_width);
      expect_same_bits("lse", a.forward.lse, b.forward.lse, s.length * s.heads);
      expect_same_bits("d_q", a.backward.d_q, b.backward.d_q, q_layout(s).extent());
      expect_same_bits("d_k", a.backward.d_k, b.backward.d_k, k_layout(s).extent());
      expect_same_bits("d_v", a.backward.d_v, b.backward.d_v, v_layout(s).extent());
      expect_same_bits("d_sink", a.backward.d_sink, b.backward.d_sink, s.heads);
    }
  }
}

TEST_P(AttentionOps, NotANumberIsPassedOn) {
  for (const Dtype dtype : kBothTypes) {
    const Case c{shape_of(100, {1, 1}, {64, 64}), {}};
    oracle::AttentionValues in = inputs(c, dtype);
    in.q[90 * 64 + 3] = std::nan("");
    const OnDevice on_device = to_device(c, in, dtype);
    ops().run(stream(), on_device.forward);
    const Values o = download(on_device.forward.o, 100 * 64);
    EXPECT_TRUE(std::isnan(o[90 * 64]));
    EXPECT_TRUE(std::isfinite(o[89 * 64]));
    EXPECT_TRUE(std::isfinite(o[91 * 64]));
  }
}

TEST_P(AttentionOps, NoTokensAreNoWork) {
  for (const Dtype dtype : kBothTypes) {
    for (const std::int64_t batch : {0, 1}) {
      Case c = with_sink({shape_of(0, {2, 1}, {64, 64}), {}});
      c.shape.batch = batch;
      const OnDevice on_device = to_device(c, inputs(c, dtype), dtype);
      ops().run(stream(), on_device.forward);
      ops().run(stream(), on_device.backward);
      EXPECT_EQ(download(on_device.backward.d_sink, 2), (Values{0.25, 0.25}));
    }
  }
}

TEST_P(AttentionOps, ShapesThatMakeNoSenseThrow) {
  const Case good{shape_of(4, {2, 1}, {16, 16}), {}};
  const OnDevice on_device = to_device(good, inputs(good, Dtype::kF32), Dtype::kF32);
  const auto refuses = [&](auto change) {
    Attention op = on_device.forward;
    change(op);
    EXPECT_THROW(ops().run(stream(), op), std::runtime_error);
  };
  refuses([](Attention& op) { op.shape.key_heads = 3; });
  refuses([](Attention& op) { op.shape.key_width = 257; });
  refuses([](Attention& op) { op.shape.value_width = 0; });
  refuses([](Attention& op) { op.shape.window = -1; });
  refuses([](Attention& op) { op.k = In(op.k.at(), Dtype::kBf16); });
  const std::int32_t* starts = upload(std::vector<std::int32_t>{0, 4});
  refuses([&](Attention& op) {
    op.shape.batch = 2;
    op.shape.packing = {1, starts};
  });
}

}  // namespace
}  // namespace terrace::trainer
