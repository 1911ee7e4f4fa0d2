#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class NormOps : public OpsUnderTest {};
TERRACE_TEST_ON_EVERY_DEVICE(NormOps);

struct Rows {
  std::int64_t rows, width;
};
constexpr Rows kShapes[] = {{1, 1}, {3, 5}, {40, 16}, {7, 67}};
constexpr float kEps = 1e-6F;

Values plus(Values a, const Values& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

TEST_P(NormOps, Rms) {
  for (const auto& [rows, width] : kShapes) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << width);
    const Values x = random_values(rows * width, 1), w = random_values(width, 2),
                 d_y = random_values(rows * width, 3);
    const Values d_w_before = random_values(width, 4), d_x_before = random_values(rows * width, 5);
    float* y = output(rows * width);
    ops().run(stream(), RmsNorm{rows, width, kEps, upload(x), upload(w), y});
    expect_near("y", y, oracle::rms_norm(x, w, kEps), kOutput);
    const Values d_x =
        numeric_gradient([&](const Values& at) { return inner(d_y, oracle::rms_norm(at, w, kEps)); }, x);
    const Values d_w =
        numeric_gradient([&](const Values& at) { return inner(d_y, oracle::rms_norm(x, at, kEps)); }, w);
    RmsNormBackward backward{.rows = rows,
                             .width = width,
                             .eps = kEps,
                             .x = upload(x),
                             .w = upload(w),
                             .d_y = upload(d_y),
                             .d_x = output(rows * width),
                             .d_w = upload(d_w_before)};
    ops().run(stream(), backward);
    if (width > 1) expect_near("d_x", backward.d_x, d_x, kGradient);  // at width 1 it is zero up to eps
    expect_near("d_w", backward.d_w, plus(d_w, d_w_before), kGradient);
    backward.d_x = upload(d_x_before);
    backward.into_d_x = Accumulate::kAdd;
    ops().run(stream(), backward);
    expect_near("d_x added", backward.d_x, plus(d_x, d_x_before), kGradient);
  }
}

TEST_P(NormOps, GatedRms) {
  for (const auto& [rows, width] : kShapes) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << width);
    const Values o = random_values(rows * width, 1), w = random_values(width, 2),
                 gate = random_values(rows * width, 3);
    const Values d_y = random_values(rows * width, 4), before = random_values(width, 5);
    const auto f = [&](const Values& a, const Values& b, const Values& c) {
      return inner(d_y, oracle::gated_rms_norm(a, b, c, kEps));
    };
    float* y = output(rows * width);
    ops().run(stream(), GatedRmsNorm{rows, width, kEps, upload(o), upload(w), upload(gate), y});
    expect_near("y", y, oracle::gated_rms_norm(o, w, gate, kEps), kOutput);
    const GatedRmsNormBackward backward{.rows = rows,
                                        .width = width,
                                        .eps = kEps,
                                        .o = upload(o),
                                        .w = upload(w),
                                        .gate = upload(gate),
                                        .d_y = upload(d_y),
                                        .d_o = output(rows * width),
                                        .d_gate = output(rows * width),
                                        .d_w = upload(before)};
    ops().run(stream(), backward);
    const Values d_o = numeric_gradient([&](const Values& at) { return f(at, w, gate); }, o);
    if (width > 1) expect_near("d_o", backward.d_o, d_o, kGradient);
    expect_near("d_gate", backward.d_gate,
                numeric_gradient([&](const Values& at) { return f(o, w, at); }, gate), kGradient);
    expect_near("d_w", backward.d_w,
                plus(numeric_gradient([&](const Values& at) { return f(o, at, gate); }, w), before),
                kGradient);
  }
}

TEST_P(NormOps, Layer) {
  for (const auto& [rows, width] : kShapes) {
    if (width == 1) continue;  // the variance of one value is nothing to normalise by
    SCOPED_TRACE(::testing::Message() << rows << " x " << width);
    const Values x = random_values(rows * width, 1), w = random_values(width, 2), b = random_values(width, 3);
    const Values d_y = random_values(rows * width, 4), before = random_values(width, 5);
    const Values d_x_before = random_values(rows * width, 6);
    const auto f = [&](const Values& at_x, const Values& at_w, const Values& at_b) {
      return inner(d_y, oracle::layer_norm(at_x, at_w, at_b, kEps));
    };
    float* y = output(rows * width);
    ops().run(stream(), LayerNorm{rows, width, kEps, upload(x), upload(w), upload(b), y});
    expect_near("y", y, oracle::layer_norm(x, w, b, kEps), kOutput);
    const Values d_x = numeric_gradient([&](const Values& at) { return f(at, w, b); }, x);
    LayerNormBackward backward{.rows = rows,
                               .width = width,
                               .eps = kEps,
                               .x = upload(x),
                               .w = upload(w),
                               .d_y = upload(d_y),
                               .d_x = output(rows * width),
                               .d_w = upload(before),
                               .d_b = upload(before)};
    ops().run(stream(), backward);
    expect_near("d_x", backward.d_x, d_x, kGradient);
    expect_near("d_w", backward.d_w,
                plus(numeric_gradient([&](const Values& at) { return f(x, at, b); }, w), before), kGradient);
    expect_near("d_b", backward.d_b,
                plus(numeric_gradient([&](const Values& at) { return f(x, w, at); }, b), before), kGradient);
    backward.d_x = upload(d_x_before);
    backward.into_d_x = Accumulate::kAdd;
    ops().run(stream(), backward);
    expect_near("d_x added", backward.d_x, plus(d_x, d_x_before), kGradient);
  }
}

}  // namespace
}  // namespace terrace::trainer
