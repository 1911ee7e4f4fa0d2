// 8-bit numbers: how they are made, to the bit, and grouped products of them.
//
// Products are compared with float64 ones of exactly the numbers that were made; large ones in every 13th
// column: what goes wrong in a tile goes wrong in a pattern of 8, 16, 32 or 64 columns.
#include <cmath>
#include <limits>

#include "examples/moe_trainer/ops/fp8.hpp"
#include "tests/trainer/ops_fixture.hpp"
#include "tests/trainer/oracle_fp8.hpp"

namespace terrace::trainer {
namespace {

using Codes = std::vector<std::uint8_t>;

double at(const Values& x, std::int64_t i) { return x[static_cast<std::size_t>(i)]; }

TEST(E4m3, EveryCodeIsWhatTheFormatSays) {
  for (int code = 0; code < 256; ++code) {
    const auto bits = static_cast<std::uint8_t>(code);
    const double want = oracle::e4m3_value(bits);
    const float got = to_float(E4m3{bits});
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
      continue;
    }
    EXPECT_EQ(got, want) << code;
    EXPECT_EQ(to_e4m3(got).bits, bits) << code;
  }
}

TEST(E4m3, RoundsToNearestAndSaturates) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto expect = [](float x) {
    ASSERT_EQ(int{to_e4m3(x).bits}, int{oracle::e4m3_code(x)}) << x;
    ASSERT_EQ(int{to_e4m3(-x).bits}, int{oracle::e4m3_code(-x)}) << -x;
  };
  for (int code = 0; code < 0x7E; ++code) {
    const double low = oracle::e4m3_value(static_cast<std::uint8_t>(code));
    const double high = oracle::e4m3_value(static_cast<std::uint8_t>(code + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    for (const float x : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, kInfinity)}) expect(x);
  }
  for (const float x : {449.0F, 464.0F, 480.0F, 1e30F, kInfinity, 1e-30F, 1e-45F, 0x1p-10F, 0x1.8p-10F}) {
    expect(x);
  }
  EXPECT_EQ(to_e4m3(std::nanf("")).bits, 0x7F);
  EXPECT_EQ(to_e4m3(-std::nanf("")).bits, 0x7F);
}

// Rows of each group, and rows past the last of them.
struct Groups {
  static constexpr std::int64_t kSpareRows = 9;
  std::int64_t count, used, rows;
  std::vector<std::int32_t> offsets{0};
  explicit Groups(const std::vector<std::int32_t>& counts) : count(static_cast<std::int64_t>(counts.size())) {
    for (const std::int32_t each : counts) offsets.push_back(offsets.back() + each);
    used = offsets.back();
    rows = used + kSpareRows;
  }
};

struct Case {
  const char* what;
  std::int64_t n, k;
  std::vector<std::int32_t> counts;
  std::int64_t stride = 1;  // columns checked
};

const std::vector<std::int32_t> kUneven = {0, 1, 63, 64, 65, 130, 0};
const std::vector<std::int32_t> kTall = {0, 130, 129, 300, 1};

std::vector<std::int32_t> few_rows(std::int64_t groups) {
  std::vector<std::int32_t> counts;
  for (std::int64_t e = 0; e < groups; ++e) counts.push_back(static_cast<std::int32_t>(e * 7 % 5));
  return counts;
}

std::vector<Case> cases() {
  return {{"odd sizes", 37, 21, kUneven},
          {"one column", 1, 1, kUneven},
          {"one tile", 40, 48, kUneven},
          {"columns in eights, depth not in sixteens", 40, 24, kUneven},
          {"tall groups, narrow", 136, 336, kTall, 13},
          {"many columns", 6152, 208, {130, 1, 0, 260}, 13},
          {"long sums", 200, 6160, {130, 1, 0, 260}, 13},
          {"300 groups of few rows", 264, 80, few_rows(300), 13},
          {"many columns of few rows", 33800, 32, {3, 0, 5}, 13},
          {"one group", 136, 128, {200}, 13}};
}

class Fp8Ops : public OpsUnderTest {
 protected:
  // Rows of 8-bit numbers on the device.
  struct Made {
    E4m3* q;
    float* scale;
    std::int64_t rows, width;
  };
  Made room(std::int64_t rows, std::int64_t width) {
    return {output((rows * width + 1) / 2, Dtype::kBf16).as<E4m3>(), output(rows), rows, width};
  }
  Made quantise(const Values& x, std::int64_t width) {
    const Made made = room(static_cast<std::int64_t>(x.size()) / width, width);
    ops().run(stream(), QuantiseRows{made.rows, width, upload(x, Dtype::kBf16), made.q, made.scale});
    return made;
  }
  Codes codes(const Made& made) {
    const std::int64_t count = made.rows * made.width;
    const auto bytes = bench().bits(In(made.q, Dtype::kBf16), (count + 1) / 2);
    Codes all;
    for (std::int64_t i = 0; i < count; ++i)
      all.push_back(std::to_integer<std::uint8_t>(bytes[static_cast<std::size_t>(i)]));
    return all;
  }
  void expect_made(const Made& got, const oracle::Quantised& want) {
    EXPECT_TRUE(codes(got) == want.codes) << "codes";
    const Values scale = download(got.scale, got.rows);
    ASSERT_EQ(scale.size(), want.scale.size());
    for (std::size_t i = 0; i < scale.size(); ++i) {
      if (std::isnan(want.scale[i])) {
        EXPECT_TRUE(std::isnan(scale[i])) << "scale " << i;
      } else {
        EXPECT_EQ(scale[i], want.scale[i]) << "scale " << i;
      }
    }
  }
  // Used rows' every stride-th column of a times w.
  static Values product(const Groups& g, const Values& a, const Values& w, const Case& c) {
    Values out;
    for (std::int64_t e = 0; e < g.count; ++e) {
      for (std::int64_t r = g.offsets[static_cast<std::size_t>(e)];
           r < g.offsets[static_cast<std::size_t>(e) + 1]; ++r) {
        for (std::int64_t j = 0; j < c.n; j += c.stride) {
          double sum = 0;
          for (std::int64_t d = 0; d < c.k; ++d) sum += at(a, r * c.k + d) * at(w, (e * c.n + j) * c.k + d);
          out.push_back(sum);
        }
      }
    }
    return out;
  }
  static Values sampled(const Values& x, const Case& c) {
    Values some;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(x.size()); ++i) {
      if (i % c.n % c.stride == 0) some.push_back(at(x, i));
    }
    return some;
  }
  void expect_rows(const char* what, In got, const Groups& g, const Case& c, const Values& want,
                   double tolerance) {
    const Values all = download(got, g.rows * c.n);
    EXPECT_LE(relative_error(sampled({all.begin(), all.begin() + g.used * c.n}, c), want), tolerance) << what;
    for (std::int64_t i = g.used * c.n; i < g.rows * c.n; ++i) {
      ASSERT_TRUE(std::isnan(at(all, i))) << what << ": wrote past the last offset, at " << i;
    }
  }
  GroupedMatmulFp8 operation(const Groups& g, const Made& a, const Made& w, Out c) {
    return {.groups = g.count,
            .rows = g.rows,
            .n = w.rows / g.count,
            .k = w.width,
            .offsets = upload(g.offsets),
            .a = a.q,
            .a_scale = a.scale,
            .w = w.q,
            .w_scale = w.scale,
            .c = c};
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(Fp8Ops);

// Random numbers of very different sizes by row, and rows that are special.
Values rows_of_every_kind(std::int64_t rows, std::int64_t width) {
  Values x = random_values(rows * width, 1);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < width; ++i) {
      double& value = x[static_cast<std::size_t>(r * width + i)];
      if (r % 8 == 1) value = i % 2 == 0 ? 0.0 : -0.0;
      if (r % 8 == 2 && i == width / 2) value = std::nan("");
      if (r % 8 == 3 && i == width - 1) value = -std::numeric_limits<double>::infinity();
      if (r % 8 == 4) value *= 0x1p-118;
      if (r % 8 == 5) value *= 0x1p120;
      if (r % 8 == 6) value *= std::exp2(static_cast<double>(i % 17) - 14);
    }
  }
  return rounded(x, Dtype::kBf16);
}

TEST_P(Fp8Ops, RowsAreQuantisedToTheBit) {
  for (const auto& [rows, width] : std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 16},
                                                                                      {1, 1},
                                                                                      {17, 13},
                                                                                      {33, 16},
                                                                                      {40, 64},
                                                                                      {16, 520},
                                                                                      {9, 1024},
                                                                                      {8, 2056},
                                                                                      {8, 8200},
                                                                                      {8, 16392}}) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << width);
    const Values x = rows_of_every_kind(rows, width);
    expect_made(quantise(x, width), oracle::quantise(x, width));
  }
}

// One row whose factor is 1, with every number of bf16 up to 448.
TEST_P(Fp8Ops, EveryNumberIsRoundedAsSpecified) {
  Values x;
  for (std::uint16_t bits = 0; bits <= 0x43E0; ++bits) {
    x.push_back(to_float(Bf16{bits}));
    x.push_back(-x.back());
  }
  while (x.size() % 8 != 0) x.push_back(0);
  // In rows of 8 as well, each with a 448: there it is read in other ways.
  Values rows;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i % 7 == 0) rows.push_back(448);
    rows.push_back(x[i]);
  }
  rows.resize(rows.size() / 8 * 8);
  expect_made(quantise(x, static_cast<std::int64_t>(x.size())),
              oracle::quantise(x, static_cast<std::int64_t>(x.size())));
  expect_made(quantise(rows, 8), oracle::quantise(rows, 8));
}

TEST_P(Fp8Ops, WeightsAreQuantisedAlongEitherAxis) {
  struct Shape {
    std::int64_t groups, n, k;
  };
  for (const Shape& s : {Shape{3, 21, 13}, Shape{2, 136, 264}, Shape{1, 4, 4}, Shape{2, 128, 128},
                         Shape{3, 260, 36}, Shape{2, 6, 12}, Shape{1, 12, 6}}) {
    SCOPED_TRACE(::testing::Message() << s.groups << " x " << s.n << " x " << s.k);
    Values w = random_values(s.groups * s.n * s.k, 3);
    for (std::int64_t i = 0; i < s.n; ++i) w[static_cast<std::size_t>(i * s.k + 1)] *= 1e4;  // a column
    for (std::int64_t i = 0; i < s.k; ++i) w[static_cast<std::size_t>(2 * s.k + i)] = 0;     // a row
    w.back() = std::nan("");
    w = rounded(w, Dtype::kBf16);
    const In on_device = upload(w, Dtype::kBf16);
    const Made straight = room(s.groups * s.n, s.k), turned = room(s.groups * s.k, s.n);
    const Made straight_alone = room(s.groups * s.n, s.k), turned_alone = room(s.groups * s.k, s.n);
    ops().run(stream(), QuantiseWeights{s.groups, s.n, s.k, on_device, straight.q, straight.scale, turned.q,
                                        turned.scale});
    ops().run(stream(), QuantiseWeights{s.groups, s.n, s.k, on_device, straight_alone.q, straight_alone.scale,
                                        nullptr, nullptr});
    ops().run(stream(), QuantiseWeights{s.groups, s.n, s.k, on_device, nullptr, nullptr, turned_alone.q,
                                        turned_alone.scale});
    const oracle::Quantised by_row = oracle::quantise(w, s.k);
    const oracle::Quantised by_column = oracle::quantise(oracle::turned(w, s.groups, s.n), s.n);
    expect_made(straight, by_row);
    expect_made(straight_alone, by_row);
    expect_made(turned, by_column);
    expect_made(turned_alone, by_column);
  }
}

TEST_P(Fp8Ops, Fp32IsRefused) {
  const Made made = room(2, 8);
  const In x = upload(random_values(16, 1), Dtype::kF32);
  EXPECT_ANY_THROW({
    ops().run(stream(), QuantiseRows{2, 8, x, made.q, made.scale});
    (void)download(made.scale, 2);
  });
}

TEST_P(Fp8Ops, ProductsAreThoseOfTheQuantisedNumbers) {
  for (const Case& c : cases()) {
    const Groups g(c.counts);
    Values a = rounded(random_values(g.rows * c.k, 1), Dtype::kBf16);
    std::fill(a.begin() + g.used * c.k, a.end(), std::nan(""));
    const Values w = rounded(random_values(g.count * c.n * c.k, 2), Dtype::kBf16);
    const Made made_a = quantise(a, c.k), made_w = quantise(w, c.k);
    const Values want = product(g, oracle::quantise(a, c.k).values(), oracle::quantise(w, c.k).values(), c);
    for (const Dtype dtype : kBothTypes) {
      SCOPED_TRACE(::testing::Message() << c.what << ", " << name_of(dtype));
      Values before = rounded(random_values(g.rows * c.n, 3), dtype);
      std::fill(before.begin() + g.used * c.n, before.end(), std::nan(""));
      const Out got = output(g.rows * c.n, dtype), added = upload(before, dtype);
      GroupedMatmulFp8 op = operation(g, made_a, made_w, got);
      ops().run(stream(), op);
      expect_rows("c", got, g, c, want, output_tolerance(dtype));
      op.c = added;
      op.into = Accumulate::kAdd;
      ops().run(stream(), op);
      Values sum = sampled({before.begin(), before.begin() + g.used * c.n}, c);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += want[i];
      expect_rows("c added", added, g, c, sum, output_tolerance(dtype));
    }
  }
}

// Rounding to 8 bits costs 3.7%, in both directions: the layouts are those of the products they stand for.
TEST_P(Fp8Ops, BothDirectionsAreNearTheProductOfBf16) {
  const Groups g(kTall);
  const std::int64_t n = 136, k = 272;
  const Values a = rounded(random_values(g.rows * k, 1), Dtype::kBf16);
  const Values d_c = rounded(random_values(g.rows * n, 2), Dtype::kBf16);
  const Values w = rounded(random_values(g.count * n * k, 3), Dtype::kBf16);
  const Made straight = room(g.count * n, k), turned = room(g.count * k, n);
  ops().run(stream(), QuantiseWeights{g.count, n, k, upload(w, Dtype::kBf16), straight.q, straight.scale,
                                      turned.q, turned.scale});
  const Case forward{"forward", n, k, kTall, 13}, backward{"input gradient", k, n, kTall, 13};
  for (const Dtype dtype : kBothTypes) {
    const Out c = output(g.rows * n, dtype), d_a = output(g.rows * k, dtype);
    ops().run(stream(), operation(g, quantise(a, k), straight, c));
    ops().run(stream(), operation(g, quantise(d_c, n), turned, d_a));
    expect_rows("c", c, g, forward, product(g, a, w, forward), 4e-2);
    expect_rows("d_a", d_a, g, backward, product(g, d_c, oracle::turned(w, g.count, n), backward), 4e-2);
  }
}

// Of terms that do not cancel a sum with too few bits would stop growing.
TEST_P(Fp8Ops, LongSumsOfOneSignKeepTheirPrecision) {
  const Groups g({70});
  const Case c{"long", 136, 8192, {70}, 13};
  const auto positive = [&](std::int64_t rows, std::uint64_t seed) {
    Values x = random_values(rows * c.k, seed);
    for (double& each : x) each = std::abs(each) + 0.25;
    return rounded(x, Dtype::kBf16);
  };
  const Values a = positive(g.rows, 1), w = positive(c.n, 2);
  const Out got = output(g.rows * c.n, Dtype::kBf16);
  ops().run(stream(), operation(g, quantise(a, c.k), quantise(w, c.k), got));
  expect_rows("c", got, g, c,
              product(g, oracle::quantise(a, c.k).values(), oracle::quantise(w, c.k).values(), c), 3e-3);
}

TEST_P(Fp8Ops, WhatIsNotFiniteStaysInItsRowAndItsChannel) {
  const Groups g({70, 5, 130});
  const std::int64_t n = 40, k = 48, row = 72, channel = 2 * n + 7;
  Values a = random_values(g.rows * k, 1), w = random_values(g.count * n * k, 2);
  a[static_cast<std::size_t>(row * k + 3)] = std::numeric_limits<double>::infinity();
  w[static_cast<std::size_t>(channel * k + 5)] = std::nan("");
  std::fill_n(a.begin(), k, 0.0);
  for (const Dtype dtype : kBothTypes) {
    const Out c = output(g.rows * n, dtype);
    ops().run(stream(), operation(g, quantise(a, k), quantise(w, k), c));
    const Values got = download(c, g.used * n);
    for (std::int64_t i = 0; i < g.used * n; ++i) {
      const std::int64_t r = i / n;
      const bool spoilt = r == row || (r >= 75 && i % n == channel % n);
      ASSERT_EQ(std::isnan(at(got, i)), spoilt) << "row " << r << ", column " << i % n;
      if (r == 0) {
        ASSERT_EQ(at(got, i), 0.0);
      }
    }
  }
}

TEST_P(Fp8Ops, NothingToDo) {
  const Groups g({0, 0, 0});
  const Case c{"empty", 24, 48, {0, 0, 0}};
  const Made a = quantise(random_values(g.rows * c.k, 1), c.k);
  const Made w = quantise(random_values(g.count * c.n * c.k, 2), c.k);
  for (const Dtype dtype : kBothTypes) {
    const Out got = output(g.rows * c.n, dtype);
    ops().run(stream(), operation(g, a, w, got));
    expect_rows("c", got, g, c, {}, 0);
  }
}

TEST_P(Fp8Ops, SameBitsAgain) {
  const Groups g(kTall);
  const std::int64_t n = 520, k = 400;
  const Values a = random_values(g.rows * k, 1), w = random_values(g.count * n * k, 2);
  for (const Dtype dtype : kBothTypes) {
    const auto run = [&] {
      const Out c = output(g.rows * n, dtype);
      ops().run(stream(), operation(g, quantise(a, k), quantise(w, k), c));
      return c;
    };
    const Out first = run();
    for (int again = 0; again < 3; ++again) expect_same_bits("c", run(), first, g.rows * n);
  }
}

}  // namespace
}  // namespace terrace::trainer
