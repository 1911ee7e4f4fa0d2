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

// The gradients again, as sums: the numeric ones above check them at small shapes.
struct NormGradients {
  Values x, w, b;
};
NormGradients norm_backward(const Values& x, const Values& w, const Values& d_y, double mean_share) {
  NormGradients d{Values(x.size()), Values(w.size()), Values(w.size())};
  const auto width = static_cast<double>(w.size());
  for (std::size_t row = 0; row < x.size(); row += w.size()) {
    double mean = 0, squares = 0, total = 0, along = 0;
    for (std::size_t i = 0; i < w.size(); ++i) mean += mean_share * x[row + i] / width;
    for (std::size_t i = 0; i < w.size(); ++i) squares += (x[row + i] - mean) * (x[row + i] - mean) / width;
    const double r = 1 / std::sqrt(squares + static_cast<double>(kEps));
    for (std::size_t i = 0; i < w.size(); ++i) {
      total += mean_share * d_y[row + i] * w[i] / width;
      along += d_y[row + i] * w[i] * (x[row + i] - mean) * r / width;
    }
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double normal = (x[row + i] - mean) * r;
      d.x[row + i] = r * (d_y[row + i] * w[i] - total - normal * along);
      d.w[i] += d_y[row + i] * normal;
      d.b[i] += d_y[row + i];
    }
  }
  return d;
}
// Heads, widths of every group of threads, one too wide for all of them, and odd ones.
constexpr Rows kWideShapes[] = {{5000, 16},  {700, 128}, {37, 64},   {40, 512},  {9, 1000}, {600, 1024},
                                {300, 3584}, {5, 7168},  {2, 16384}, {2, 16392}, {1, 2},    {90, 36}};

TEST_P(NormOps, WideRowsInBothTypes) {
  for (const auto& [rows, width] : kWideShapes) {
    for (const Dtype dtype : kBothTypes) {
      if (dtype == Dtype::kF32 && rows * width > 700'000) continue;
      SCOPED_TRACE(::testing::Message() << rows << " x " << width << " " << name_of(dtype));
      const std::int64_t count = rows * width;
      const Values x = rounded(random_values(count, 1), dtype), d_y = rounded(random_values(count, 2), dtype);
      const Values w = random_values(width, 3), b = random_values(width, 4);
      const Out x_at = upload(x, dtype), d_y_at = upload(d_y, dtype), y = output(count, dtype);
      const float *w_at = upload(w), *b_at = upload(b);
      ops().run(stream(), RmsNorm{rows, width, kEps, x_at, w_at, y});
      expect_near("rms", y, oracle::rms_norm(x, w, kEps), output_tolerance(dtype));
      const NormGradients rms = norm_backward(x, w, d_y, 0);
      RmsNormBackward back{.rows = rows,
                           .width = width,
                           .eps = kEps,
                           .x = x_at,
                           .w = w_at,
                           .d_y = d_y_at,
                           .d_x = output(count, dtype),
                           .d_w = zeros(width)};
      ops().run(stream(), back);
      expect_near("rms d_x", back.d_x, rms.x, gradient_tolerance(dtype));
      expect_near("rms d_w", back.d_w, rms.w, gradient_tolerance(dtype));
      RmsNormBackward again = back;
      again.d_w = zeros(width);
      ops().run(stream(), again);
      expect_same_bits("rms d_w", back.d_w, again.d_w, width);
      ops().run(stream(), LayerNorm{rows, width, kEps, x_at, w_at, b_at, y});
      expect_near("layer", y, oracle::layer_norm(x, w, b, kEps), output_tolerance(dtype));
      const NormGradients layer = norm_backward(x, w, d_y, 1);
      const LayerNormBackward layer_back{.rows = rows,
                                         .width = width,
                                         .eps = kEps,
                                         .x = x_at,
                                         .w = w_at,
                                         .d_y = d_y_at,
                                         .d_x = output(count, dtype),
                                         .d_w = zeros(width),
                                         .d_b = zeros(width)};
      ops().run(stream(), layer_back);
      // Two numbers a row leave next to nothing of the gradient.
      if (width > 2) expect_near("layer d_x", layer_back.d_x, layer.x, gradient_tolerance(dtype));
      expect_near("layer d_w", layer_back.d_w, layer.w, gradient_tolerance(dtype));
      expect_near("layer d_b", layer_back.d_b, layer.b, gradient_tolerance(dtype));
    }
  }
}

TEST_P(NormOps, GatedRowsInBothTypes) {
  for (const auto& [rows, width] : {Rows{500, 128}, Rows{33, 64}, Rows{3, 2048}, Rows{9, 20}}) {
    for (const Dtype dtype : kBothTypes) {
      SCOPED_TRACE(::testing::Message() << rows << " x " << width << " " << name_of(dtype));
      const std::int64_t count = rows * width;
      const Values o = rounded(random_values(count, 1), dtype), d_y = rounded(random_values(count, 2), dtype);
      const Values gate = rounded(random_values(count, 4, 3.0), dtype), w = random_values(width, 3);
      Values through = d_y, d_gate = oracle::gated_rms_norm(o, w, gate, kEps);
      for (std::size_t i = 0; i < gate.size(); ++i) {
        through[i] *= oracle::sigmoid(gate[i]);
        d_gate[i] *= d_y[i] * (1 - oracle::sigmoid(gate[i]));
      }
      const NormGradients want = norm_backward(o, w, through, 0);
      const Out o_at = upload(o, dtype), gate_at = upload(gate, dtype), y = output(count, dtype);
      const float* w_at = upload(w);
      ops().run(stream(), GatedRmsNorm{rows, width, kEps, o_at, w_at, gate_at, y});
      expect_near("y", y, oracle::gated_rms_norm(o, w, gate, kEps), output_tolerance(dtype));
      const GatedRmsNormBackward back{.rows = rows,
                                      .width = width,
                                      .eps = kEps,
                                      .o = o_at,
                                      .w = w_at,
                                      .gate = gate_at,
                                      .d_y = upload(d_y, dtype),
                                      .d_o = output(count, dtype),
                                      .d_gate = output(count, dtype),
                                      .d_w = zeros(width)};
      ops().run(stream(), back);
      expect_near("d_o", back.d_o, want.x, gradient_tolerance(dtype));
      expect_near("d_gate", back.d_gate, d_gate, gradient_tolerance(dtype));
      expect_near("d_w", back.d_w, want.w, gradient_tolerance(dtype));
    }
  }
}

TEST_P(NormOps, ResidualIsAddedAndItsGradientToo) {
  for (const auto& [rows, width] : {Rows{7, 64}, Rows{5, 67}, Rows{3, 4096}}) {
    for (const Dtype dtype : kBothTypes) {
      SCOPED_TRACE(::testing::Message() << rows << " x " << width << " " << name_of(dtype));
      const std::int64_t count = rows * width;
      const Values x = rounded(random_values(count, 1), dtype), w = random_values(width, 3);
      const Values residual = rounded(random_values(count, 2), dtype);
      const Values d_y = rounded(random_values(count, 4), dtype),
                   d_sum = rounded(random_values(count, 5), dtype);
      const Values sum = rounded(plus(x, residual), dtype);
      RmsNorm op{rows, width, kEps, upload(x, dtype), upload(w), output(count, dtype)};
      op.residual = upload(residual, dtype);
      EXPECT_THROW(ops().run(stream(), op), std::runtime_error) << "no place for the sum";
      op.sum = upload(residual, dtype);
      op.residual = op.sum;  // in place
      ops().run(stream(), op);
      expect_near("sum", op.sum, sum, output_tolerance(dtype));
      expect_near("y", op.y, oracle::rms_norm(sum, w, kEps), output_tolerance(dtype));
      const RmsNormBackward back{.rows = rows,
                                 .width = width,
                                 .eps = kEps,
                                 .x = op.sum,
                                 .w = op.w,
                                 .d_y = upload(d_y, dtype),
                                 .d_x = output(count, dtype),
                                 .d_w = nullptr,
                                 .d_sum = upload(d_sum, dtype)};
      ops().run(stream(), back);
      expect_near("d_x", back.d_x, plus(norm_backward(sum, w, d_y, 0).x, d_sum), gradient_tolerance(dtype));
    }
  }
}

}  // namespace
}  // namespace terrace::trainer
