#include "tests/trainer/ops_fixture.hpp"
#include "tests/trainer/oracle_rows.hpp"

namespace terrace::trainer {
namespace {

constexpr float kEps = 1e-6F;

struct Shape {
  std::int64_t rows, width, sources;
};

oracle::AttnResValues values_of(const Shape& s, Dtype dtype) {
  // Logits of about one: a softmax that is all on one source has gradients of nothing but rounding.
  const double query = 1 / std::sqrt(static_cast<double>(s.width));
  oracle::AttnResValues in{s.width, kEps, {}, random_values(s.width, 1), random_values(s.width, 2, query)};
  for (std::int64_t l = 0; l < s.sources; ++l) {
    const auto seed = static_cast<std::uint64_t>(10 + l);
    in.v.push_back(rounded(random_values(s.rows * s.width, seed, 0.5 + 0.4 * static_cast<double>(l)), dtype));
  }
  return in;
}

class AttnResOps : public OpsUnderTest {
 protected:
  AttnRes forward_of(const Shape& s, const oracle::AttnResValues& in, Dtype dtype) {
    AttnRes op{.rows = s.rows,
               .width = s.width,
               .sources = s.sources,
               .eps = kEps,
               .v = {},
               .w = upload(in.w),
               .q = upload(in.q),
               .h = output(s.rows * s.width, dtype)};
    for (std::size_t l = 0; l < in.v.size(); ++l) op.v[l] = upload(in.v[l], dtype);
    return op;
  }
  AttnResBackward backward_of(const AttnRes& forward, Out d_h) {
    AttnResBackward op{.rows = forward.rows,
                       .width = forward.width,
                       .sources = forward.sources,
                       .eps = kEps,
                       .v = {},
                       .w = forward.w,
                       .q = forward.q,
                       .d_h = d_h,
                       .d_v = {},
                       .d_w = zeros(forward.width),
                       .d_q = zeros(forward.width)};
    for (std::int64_t l = 0; l < forward.sources; ++l) {
      op.v[l] = forward.v[l];
      op.d_v[l] = output(forward.rows * forward.width, d_h.dtype());
    }
    return op;
  }
  void check(const Shape& s, Dtype dtype) {
    SCOPED_TRACE(::testing::Message()
                 << s.rows << " x " << s.width << ", " << s.sources << " sources, " << name_of(dtype));
    const oracle::AttnResValues in = values_of(s, dtype);
    AttnRes forward = forward_of(s, in, dtype);
    forward.probability = output(s.rows * s.sources);
    ops().run(stream(), forward);
    expect_near("h", forward.h, oracle::attn_res(in), output_tolerance(dtype));
    expect_near("probability", forward.probability, oracle::attn_res_probability(in),
                output_tolerance(dtype));
    const Values d_h = rounded(random_values(s.rows * s.width, 3), dtype);
    const AttnResBackward backward = backward_of(forward, upload(d_h, dtype));
    ops().run(stream(), backward);
    const oracle::AttnResGradients want = oracle::attn_res_backward(in, d_h);
    for (std::size_t l = 0; l < in.v.size(); ++l) {
      expect_near("d_v", backward.d_v[l], want.v[l], gradient_tolerance(dtype));
    }
    // The weights of one source do not change; a row of one number is its sign, whatever the number.
    if (s.sources == 1 || s.width == 1) return;
    expect_near("d_w", backward.d_w, want.w, gradient_tolerance(dtype));
    expect_near("d_q", backward.d_q, want.q, gradient_tolerance(dtype));
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(AttnResOps);

TEST(AttnResOracle, GradientsAreNumericOnes) {
  const oracle::AttnResValues in = values_of({3, 5, 4}, Dtype::kF32);
  const Values d_h = random_values(15, 3);
  const oracle::AttnResGradients got = oracle::attn_res_backward(in, d_h);
  const auto gradient = [&](auto member, const Values& at) {
    return numeric_gradient(
        [&](const Values& x) {
          oracle::AttnResValues moved = in;
          member(moved) = x;
          return inner(d_h, oracle::attn_res(moved));
        },
        at);
  };
  for (std::size_t l = 0; l < in.v.size(); ++l) {
    const auto want = gradient([l](auto& moved) -> Values& { return moved.v[l]; }, in.v[l]);
    EXPECT_LE(relative_error(got.v[l], want), 1e-7) << l;
  }
  EXPECT_LE(relative_error(got.w, gradient([](auto& moved) -> Values& { return moved.w; }, in.w)), 1e-7);
  EXPECT_LE(relative_error(got.q, gradient([](auto& moved) -> Values& { return moved.q; }, in.q)), 1e-7);
}

TEST_P(AttnResOps, ForwardAndBackward) {
  // One row, one source, widths that 16 bytes do not divide, all sources, one and two packs a thread.
  constexpr Shape kShapes[] = {{1, 1, 2},    {3, 5, 4},     {7, 67, 3},   {1, 64, 1},
                               {33, 64, 16}, {5, 72, 9},    {3, 520, 12}, {4, 3592, 4},
                               {2, 7168, 9}, {2, 7168, 12}, {1, 8192, 3}};
  for (const Shape& s : kShapes) {
    for (const Dtype dtype : kBothTypes) check(s, dtype);
  }
}

TEST_P(AttnResOps, MoreRowsThanBlocks) {
  check({4400, 64, 5}, Dtype::kBf16);
  check({140, 7168, 3}, Dtype::kBf16);
  check({600, 24, 3}, Dtype::kF32);
}

TEST_P(AttnResOps, AddsToSomeGradientsLeavesOthersOut) {
  for (const Shape& s : {Shape{150, 7168, 4}, Shape{9, 64, 6}, Shape{5, 33, 4}}) {
    for (const Dtype dtype : kBothTypes) {
      if (dtype == Dtype::kF32 && s.rows > 100) continue;
      SCOPED_TRACE(::testing::Message() << s.width << " " << name_of(dtype));
      const oracle::AttnResValues in = values_of(s, dtype);
      const Values d_h = rounded(random_values(s.rows * s.width, 3), dtype);
      const Values before = rounded(random_values(s.rows * s.width, 4), dtype);
      AttnResBackward backward = backward_of(forward_of(s, in, dtype), upload(d_h, dtype));
      backward.d_v[0] = upload(before, dtype);
      backward.into_d_v[0] = Accumulate::kAdd;
      backward.d_v[1] = nullptr;
      backward.d_v[3] = upload(before, dtype);
      backward.into_d_v[3] = Accumulate::kAdd;
      backward.d_q = nullptr;
      ops().run(stream(), backward);
      const oracle::AttnResGradients want = oracle::attn_res_backward(in, d_h);
      for (std::size_t l = 0; l < in.v.size(); ++l) {
        if (l == 1) continue;
        Values sum = want.v[l];
        const bool added = backward.into_d_v[l] == Accumulate::kAdd;
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += added ? before[i] : 0;
        expect_near("d_v", backward.d_v[l], sum, gradient_tolerance(dtype));
      }
      expect_near("d_w", backward.d_w, want.w, gradient_tolerance(dtype));
    }
  }
}

TEST_P(AttnResOps, RepeatsItsBits) {
  for (const Dtype dtype : kBothTypes) {
    const Shape s{300, 128, 9};
    const oracle::AttnResValues in = values_of(s, dtype);
    const AttnRes forward = forward_of(s, in, dtype);
    const Out d_h = upload(random_values(s.rows * s.width, 3), dtype);
    const AttnResBackward a = backward_of(forward, d_h), b = backward_of(forward, d_h);
    ops().run(stream(), a);
    ops().run(stream(), b);
    for (std::int64_t l = 0; l < s.sources; ++l) {
      expect_same_bits("d_v", a.d_v[l], b.d_v[l], s.rows * s.width);
    }
    expect_same_bits("d_w", a.d_w, b.d_w, s.width);
    expect_same_bits("d_q", a.d_q, b.d_q, s.width);
  }
}

TEST_P(AttnResOps, NothingAndTooMuch) {
  AttnRes op = forward_of({0, 8, 2}, values_of({0, 8, 2}, Dtype::kF32), Dtype::kF32);
  ops().run(stream(), op);
  op.sources = 0;
  EXPECT_THROW(ops().run(stream(), op), std::runtime_error);
  op.sources = 17;
  EXPECT_THROW(ops().run(stream(), op), std::runtime_error);
}

}  // namespace
}  // namespace terrace::trainer
