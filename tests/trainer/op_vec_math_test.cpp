// The vector functions against libm in double precision, over their whole range.
#include "examples/moe_trainer/ops/cpu/vec_math.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace terrace::trainer::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Range {
  float from, to;
};

bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// The largest relative error over a dense grid; every lane takes part.
double worst(const Range& range, const std::function<Vec(Vec)>& f,
             const std::function<double(double)>& exact) {
  constexpr int kSteps = 40'000;
  double most = 0;
  for (int i = 0; i < kSteps; i += 8) {
    Vec x;
    for (int lane = 0; lane < 8; ++lane) {
      x[lane] = range.from + (range.to - range.from) * static_cast<float>(i + lane) / kSteps;
    }
    const Vec y = f(x);
    for (int lane = 0; lane < 8; ++lane) {
      const double want = exact(static_cast<double>(x[lane]));
      if (want == 0) {
        EXPECT_EQ(y[lane], 0.0F) << x[lane];
        continue;
      }
      most = std::max(most, std::abs((static_cast<double>(y[lane]) - want) / want));
    }
  }
  return most;
}

class VecMath : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!runs_here()) GTEST_SKIP() << "this processor lacks AVX2 or FMA";
  }
};

constexpr double kError = 3e-7;

TEST_F(VecMath, Exp) {
  const auto f = [](Vec x) { return exp(x); };
  const auto exact = [](double x) { return std::exp(x); };
  EXPECT_LE(worst({-87.0F, 88.7F}, f, exact), kError);
  EXPECT_LE(worst({-1.0F, 1.0F}, f, exact), kError);
  const Vec y = exp(Vec{kInfinity, -kInfinity, kNan, 89.0F, -105.0F, 0.0F, -100.0F, 1e30F});
  EXPECT_EQ(y[0], kInfinity);
  EXPECT_EQ(y[1], 0.0F);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[3], kInfinity);
  EXPECT_EQ(y[4], 0.0F);
  EXPECT_EQ(y[5], 1.0F);
  EXPECT_NEAR(static_cast<double>(y[6]), std::exp(-100.0), 2e-45);
  EXPECT_EQ(y[7], kInfinity);
}

TEST_F(VecMath, SigmoidAndSilu) {
  EXPECT_LE(
      worst(
          {-80.0F, 80.0F}, [](Vec x) { return sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); }),
      kError);
  EXPECT_LE(
      worst(
          {-80.0F, 80.0F}, [](Vec x) { return silu(x); }, [](double x) { return x / (1 + std::exp(-x)); }),
      kError);
  const Vec y = sigmoid(Vec{kInfinity, -kInfinity, kNan, 0.0F, 200.0F, -200.0F, 1.0F, -1.0F});
  EXPECT_EQ(y[0], 1.0F);
  EXPECT_EQ(y[1], 0.0F);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[3], 0.5F);
  EXPECT_EQ(y[4], 1.0F);
  EXPECT_EQ(y[5], 0.0F);
}

TEST_F(VecMath, Tanh) {
  const auto f = [](Vec x) { return tanh(x); };
  const auto exact = [](double x) { return std::tanh(x); };
  EXPECT_LE(worst({-0.01F, 0.01F}, f, exact), kError);
  EXPECT_LE(worst({-1.0F, 1.0F}, f, exact), kError);
  EXPECT_LE(worst({-20.0F, 20.0F}, f, exact), kError);
  EXPECT_EQ(tanh(splat(100.0F))[0], 1.0F);
  EXPECT_EQ(tanh(splat(-100.0F))[0], -1.0F);
  EXPECT_TRUE(std::isnan(tanh(splat(kNan))[0]));
}

TEST_F(VecMath, Softplus) {
  const auto f = [](Vec x) { return softplus(x); };
  const auto exact = [](double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); };
  EXPECT_LE(worst({-80.0F, 80.0F}, f, exact), kError);
  EXPECT_LE(worst({-2.0F, 2.0F}, f, exact), kError);
  EXPECT_EQ(softplus(splat(1000.0F))[0], 1000.0F);
  EXPECT_EQ(softplus(splat(-1000.0F))[0], 0.0F);
  EXPECT_TRUE(std::isnan(softplus(splat(kNan))[0]));
}

TEST_F(VecMath, Log) {
  const auto f = [](Vec x) { return log(x); };
  const auto exact = [](double x) { return std::log(x); };
  EXPECT_LE(worst({1e-6F, 0.9F}, f, exact), kError);
  EXPECT_LE(worst({0.9F, 1.1F}, f, exact), kError);
  EXPECT_LE(worst({1.1F, 1e6F}, f, exact), kError);
  EXPECT_EQ(log(zero())[0], -kInfinity);
  EXPECT_TRUE(std::isnan(log(splat(-1.0F))[0]));
  EXPECT_TRUE(std::isnan(log(splat(kNan))[0]));
}

TEST_F(VecMath, PartialLoadsTouchNothingElse) {
  float memory[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  for (std::int64_t n = 0; n <= 8; ++n) {
    const Vec v = load_part(memory, n);
    for (int lane = 0; lane < 8; ++lane) EXPECT_EQ(v[lane], lane < n ? static_cast<float>(lane + 1) : 0.0F);
    float out[9] = {};
    store_part(out, splat(5.0F), n);
    for (std::int64_t i = 0; i < 9; ++i) EXPECT_EQ(out[i], i < n ? 5.0F : 0.0F);
  }
  EXPECT_EQ(dot(memory, memory, 12), 650.0F);
}

}  // namespace
}  // namespace terrace::trainer::cpu
