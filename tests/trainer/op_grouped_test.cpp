// Grouped products, their gradients, and the gated activation alone and behind a product.
//
// Cases name the rows of each group. Large ones are checked in every 13th column: what goes wrong in a tile
// goes wrong in a pattern of 8, 16, 32 or 64 columns.
#include <cmath>
#include <numeric>

#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

struct Case {
  const char* what;
  std::int64_t n, k;
  std::vector<std::int32_t> counts;  // rows of each group
  std::int64_t stride = 1;           // columns checked
};

const std::vector<std::int32_t> kUneven = {0, 1, 63, 64, 65, 130, 0};
const std::vector<std::int32_t> kTall = {0, 130, 129, 300, 1};
const std::vector<std::int32_t> kEvenAndOddTiles = {130, 1, 0, 260};  // 2, 1, 0 and 3 rows of tiles

std::vector<std::int32_t> few_rows(std::int64_t groups) {
  std::vector<std::int32_t> counts;
  for (std::int64_t e = 0; e < groups; ++e) counts.push_back(static_cast<std::int32_t>(e * 7 % 5));
  return counts;
}

// More tiles than blocks, and sums of many lengths next to one another.
std::vector<std::int32_t> uneven_groups(std::int64_t groups) {
  std::vector<std::int32_t> counts;
  for (std::int64_t e = 0; e < groups; ++e)
    counts.push_back(static_cast<std::int32_t>(e % 30 == 3 ? 600 + e : e * 37 % 150));
  return counts;
}

std::vector<Case> cases() {
  return {{"odd sizes", 37, 21, kUneven},
          {"one column", 1, 1, kUneven},
          {"one tile", 40, 24, kUneven},
          {"tall groups, narrow", 136, 328, kTall, 13},
          {"many columns", 6152, 200, kEvenAndOddTiles, 13},
          {"many columns backwards", 200, 6152, kEvenAndOddTiles, 13},
          {"300 groups of few rows", 264, 72, few_rows(300), 13},
          {"140 groups of few rows, wide tiles", 256, 16, few_rows(140), 13},
          {"140 groups of few rows, wide tiles backwards", 16, 256, few_rows(140), 13},
          {"one group", 136, 136, {200}, 13}};
}

constexpr std::int64_t kSpareRows = 9;  // past the last offset

struct Grouped {
  std::int64_t groups, rows, used;
  std::vector<std::int32_t> offsets{0};
  explicit Grouped(const std::vector<std::int32_t>& counts)
      : groups(static_cast<std::int64_t>(counts.size())) {
    for (const std::int32_t count : counts) offsets.push_back(offsets.back() + count);
    used = offsets.back();
    rows = used + kSpareRows;
  }
  [[nodiscard]] std::int64_t begin(std::int64_t group) const {
    return offsets[static_cast<std::size_t>(group)];
  }
  // Rows of `width` numbers, NaN past the last offset.
  [[nodiscard]] Values rows_of(std::int64_t width, std::uint64_t seed, Dtype dtype) const {
    Values x = rounded(random_values(rows * width, seed), dtype);
    std::fill(x.begin() + used * width, x.end(), std::nan(""));
    return x;
  }
};

double at(const Values& x, std::int64_t i) { return x[static_cast<std::size_t>(i)]; }

class GroupedOps : public OpsUnderTest {
 protected:
  // The numbers of every stride-th column.
  static Values sampled(const Values& x, std::int64_t width, std::int64_t stride) {
    Values some;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(x.size()); ++i) {
      if (i % width % stride == 0) some.push_back(at(x, i));
    }
    return some;
  }
  // `want` has the used rows' sampled columns; the spare rows must still be NaN.
  void expect_rows(const char* what, In got, const Grouped& g, std::int64_t width, std::int64_t stride,
                   const Values& want, double tolerance) {
    const Values all = download(got, g.rows * width);
    const Values used(all.begin(), all.begin() + g.used * width);
    EXPECT_LE(relative_error(sampled(used, width, stride), want), tolerance) << what;
    for (std::int64_t i = g.used * width; i < g.rows * width; ++i) {
      ASSERT_TRUE(std::isnan(at(all, i))) << what << ": wrote past the last offset, at " << i;
    }
  }
  // c (used, columns sampled): c_rj = sum over d of x_rd w_e at (j * step + d * depth_step).
  struct Weights {
    const Values& w;
    std::int64_t columns, depth, step, depth_step;
  };
  static Values product(const Grouped& g, const Values& x, const Weights& w, std::int64_t stride) {
    Values c;
    for (std::int64_t e = 0; e < g.groups; ++e) {
      const std::int64_t base = e * w.columns * w.depth;
      for (std::int64_t r = g.begin(e); r < g.begin(e + 1); ++r) {
        for (std::int64_t j = 0; j < w.columns; j += stride) {
          double sum = 0;
          for (std::int64_t d = 0; d < w.depth; ++d) {
            sum += at(x, r * w.depth + d) * at(w.w, base + j * w.step + d * w.depth_step);
          }
          c.push_back(sum);
        }
      }
    }
    return c;
  }
  // What is there before an addition: NaN past the last offset.
  static Values plus(Values a, const Values& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(GroupedOps);

TEST_P(GroupedOps, Forward) {
  for (const Dtype dtype : kBothTypes) {
    for (const Case& each : cases()) {
      SCOPED_TRACE(::testing::Message() << each.what << ", " << name_of(dtype));
      const Grouped g(each.counts);
      const Values a = g.rows_of(each.k, 1, dtype), before = g.rows_of(each.n, 2, dtype);
      const Values w = rounded(random_values(g.groups * each.n * each.k, 3), dtype);
      const Values c = product(g, a, {w, each.n, each.k, each.k, 1}, each.stride);
      const Out got = output(g.rows * each.n, dtype), added = upload(before, dtype);
      GroupedMatmul op{g.groups,          g.rows,           each.n,           each.k,
                       upload(g.offsets), upload(a, dtype), upload(w, dtype), got};
      ops().grouped_forward(stream(), op);
      expect_rows("c", got, g, each.n, each.stride, c, output_tolerance(dtype));
      op.c = added;
      op.into = Accumulate::kAdd;
      ops().grouped_forward(stream(), op);
      const Values used(before.begin(), before.begin() + g.used * each.n);
      expect_rows("c added", added, g, each.n, each.stride, plus(sampled(used, each.n, each.stride), c),
                  output_tolerance(dtype));
    }
  }
}

TEST_P(GroupedOps, InputGradient) {
  for (const Dtype dtype : kBothTypes) {
    for (const Case& each : cases()) {
      SCOPED_TRACE(::testing::Message() << each.what << ", " << name_of(dtype));
      const Grouped g(each.counts);
      const Values d_c = g.rows_of(each.n, 4, dtype), before = g.rows_of(each.k, 5, dtype);
      const Values w = rounded(random_values(g.groups * each.n * each.k, 6), dtype);
      const Values d_a = product(g, d_c, {w, each.k, each.n, 1, each.k}, each.stride);
      const Out got = output(g.rows * each.k, dtype), added = upload(before, dtype);
      GroupedMatmul op{g.groups,           g.rows,           each.n, each.k, upload(g.offsets),
                       upload(d_c, dtype), upload(w, dtype), got};
      ops().grouped_input_gradient(stream(), op);
      expect_rows("d_a", got, g, each.k, each.stride, d_a, gradient_tolerance(dtype));
      op.c = added;
      op.into = Accumulate::kAdd;
      ops().grouped_input_gradient(stream(), op);
      const Values used(before.begin(), before.begin() + g.used * each.k);
      expect_rows("d_a added", added, g, each.k, each.stride, plus(sampled(used, each.k, each.stride), d_a),
                  gradient_tolerance(dtype));
    }
  }
}

TEST_P(GroupedOps, WeightGradient) {
  std::vector<Case> all = {{"odd sizes", 37, 21, kUneven},
                           {"one tile", 40, 24, kUneven},
                           {"tall groups", 136, 264, kTall, 13},
                           {"wide", 520, 2568, {0, 130, 1, 205}, 13},
                           {"300 groups of few rows", 72, 136, few_rows(300), 13},
                           {"uneven groups, few columns", 264, 128, uneven_groups(90), 13},
                           {"uneven groups, few rows of each", 72, 392, uneven_groups(90), 13}};
  for (const Dtype dtype : kBothTypes) {
    for (const Case& each : all) {
      SCOPED_TRACE(::testing::Message() << each.what << ", " << name_of(dtype));
      const Grouped g(each.counts);
      const Values d_c = g.rows_of(each.n, 7, dtype), a = g.rows_of(each.k, 8, dtype);
      const Values before = random_values(g.groups * each.n * each.k, 9);
      Values want;
      for (std::int64_t e = 0; e < g.groups; ++e) {
        for (std::int64_t j = 0; j < each.n; ++j) {
          for (std::int64_t i = 0; i < each.k; i += each.stride) {
            double sum = 0;
            for (std::int64_t r = g.begin(e); r < g.begin(e + 1); ++r)
              sum += at(d_c, r * each.n + j) * at(a, r * each.k + i);
            want.push_back(sum);
          }
        }
      }
      const std::int64_t count = g.groups * each.n * each.k;
      float *got = output(count), *added = upload(before);
      GroupedWeightGradient op{g.groups,           g.rows,           each.n, each.k, upload(g.offsets),
                               upload(d_c, dtype), upload(a, dtype), got};
      ops().run(stream(), op);
      op.d_w = added;
      op.into = Accumulate::kAdd;
      ops().run(stream(), op);
      const auto columns = [&](const Values& x) { return sampled(x, each.k, each.stride); };
      const Values d_w = download(got, count);
      EXPECT_LE(relative_error(columns(d_w), want), kGradient) << "d_w";
      EXPECT_LE(relative_error(columns(download(added, count)), plus(columns(before), want)), kGradient)
          << "added";
      for (std::int64_t e = 0; e < g.groups; ++e) {
        if (g.begin(e) != g.begin(e + 1)) continue;
        for (std::int64_t i = e * each.n * each.k; i < (e + 1) * each.n * each.k; ++i)
          ASSERT_EQ(at(d_w, i), 0) << e;
      }
    }
  }
}

double activated(GluActivation activation, double g, double u) {
  if (activation == GluActivation::kSitu) return oracle::situ_glu({g}, {u})[0];
  return g * oracle::sigmoid(g) * u;
}

TEST_P(GroupedOps, ProductWithActivation) {
  const std::vector<Case> all = {{"odd sizes", 19, 21, kUneven},
                                 {"few rows each", 200, 136, kUneven, 13},
                                 {"tall groups", 200, 328, kTall, 13},
                                 {"tall groups, few columns", 72, 136, kTall, 13},
                                 {"tall groups, many columns", 2824, 72, kEvenAndOddTiles, 13},
                                 {"300 groups of few rows", 72, 72, few_rows(300), 13}};
  for (const Dtype dtype : kBothTypes) {
    for (const Case& each : all) {
      for (const GluActivation activation : {GluActivation::kSitu, GluActivation::kSwi}) {
        SCOPED_TRACE(::testing::Message() << each.what << ", " << name_of(dtype));
        const Grouped g(each.counts);
        const std::int64_t n = each.n, k = each.k;
        const Values a = g.rows_of(k, 1, dtype);
        const Values w = rounded(random_values(g.groups * 2 * n * k, 2, 0.2), dtype);
        const Values gu = product(g, a, {w, 2 * n, k, k, 1}, 1);
        Values y;
        for (std::int64_t r = 0; r < g.used; ++r) {
          for (std::int64_t j = 0; j < n; ++j) {
            y.push_back(activated(activation, at(gu, r * 2 * n + j), at(gu, r * 2 * n + n + j)));
          }
        }
        const Out got_y = output(g.rows * n, dtype), alone = output(g.rows * n, dtype);
        const Out got_gu = output(g.rows * 2 * n, dtype);
        GroupedGlu op{g.groups,         g.rows,           n,     k,     activation, upload(g.offsets),
                      upload(a, dtype), upload(w, dtype), got_y, got_gu};
        ops().run(stream(), op);
        op.y = alone;
        op.gu = nullptr;
        ops().run(stream(), op);
        expect_rows("y", got_y, g, n, 1, y, output_tolerance(dtype));
        expect_rows("gu", got_gu, g, 2 * n, 1, gu, output_tolerance(dtype));
        expect_rows("y without gu", alone, g, n, 1, y, output_tolerance(dtype));
      }
    }
  }
}

TEST_P(GroupedOps, NoRowsAtAll) {
  const Grouped g({0, 0, 0});
  const std::int64_t n = 24, k = 40, count = g.groups * n * k;
  for (const Dtype dtype : kBothTypes) {
    const Out c = output(g.rows * n, dtype), y = output(g.rows * n, dtype);
    const Values a = g.rows_of(k, 1, dtype), d_c = g.rows_of(n, 2, dtype);
    const std::int32_t* offsets = upload(g.offsets);
    float *d_w = output(count), *none = output(count), *kept = upload(random_values(count, 3));
    ops().grouped_forward(stream(), {g.groups, g.rows, n, k, offsets, upload(a, dtype),
                                     upload(random_values(count, 4), dtype), c});
    ops().run(stream(), GroupedGlu{g.groups, g.rows, n, k, GluActivation::kSwi, offsets, upload(a, dtype),
                                   upload(random_values(2 * count, 4), dtype), y});
    const In up = upload(d_c, dtype), in = upload(a, dtype);
    ops().run(stream(), GroupedWeightGradient{g.groups, g.rows, n, k, offsets, up, in, d_w});
    ops().run(stream(), GroupedWeightGradient{g.groups, 0, n, k, offsets, up, in, none});
    ops().run(stream(),
              GroupedWeightGradient{g.groups, g.rows, n, k, offsets, up, in, kept, Accumulate::kAdd});
    expect_rows("c", c, g, n, 1, {}, 0);
    expect_rows("y", y, g, n, 1, {}, 0);
    expect_near("d_w", d_w, Values(static_cast<std::size_t>(count)), 0);
    expect_near("d_w of no rows", none, Values(static_cast<std::size_t>(count)), 0);
    expect_near("kept", kept, random_values(count, 3), 0);
  }
}

TEST_P(GroupedOps, SameBitsAgain) {
  const Grouped g(kTall);
  const std::int64_t n = 520, k = 264, count = g.groups * n * k;
  for (const Dtype dtype : kBothTypes) {
    const In a = upload(g.rows_of(k, 1, dtype), dtype), d_c = upload(g.rows_of(n, 2, dtype), dtype);
    const In w = upload(random_values(count, 3), dtype);
    const Values before = random_values(count, 4);
    const std::int32_t* offsets = upload(g.offsets);
    struct Results {
      Out c, d_a, y;
      float* d_w;
    };
    const auto run = [&]() -> Results {
      const Results r{output(g.rows * n, dtype), output(g.rows * k, dtype), output(g.rows * n / 2, dtype),
                      upload(before)};
      ops().grouped_forward(stream(), {g.groups, g.rows, n, k, offsets, a, w, r.c});
      ops().grouped_input_gradient(stream(), {g.groups, g.rows, n, k, offsets, d_c, w, r.d_a});
      ops().run(stream(), GroupedGlu{g.groups, g.rows, n / 2, k, GluActivation::kSitu, offsets, a, w, r.y});
      ops().run(stream(),
                GroupedWeightGradient{g.groups, g.rows, n, k, offsets, d_c, a, r.d_w, Accumulate::kAdd});
      return r;
    };
    const Results first = run();
    for (int again = 0; again < 3; ++again) {
      const Results next = run();
      expect_same_bits("c", next.c, first.c, g.rows * n);
      expect_same_bits("d_a", next.d_a, first.d_a, g.rows * k);
      expect_same_bits("y", next.y, first.y, g.rows * n / 2);
      expect_same_bits("d_w", next.d_w, first.d_w, count);
    }
  }
}

// How the rows of g and u lie: apart and dense, or as halves of one array.
struct Layout {
  std::int64_t rows, width;
  bool halves;
};

TEST_P(GroupedOps, ActivationAlone) {
  for (const Dtype dtype : kBothTypes) {
    for (const GluActivation activation : {GluActivation::kSitu, GluActivation::kSwi}) {
      for (const Layout& l : {Layout{7, 13, false}, Layout{7, 13, true}, Layout{33, 64, true},
                              Layout{1, 1, true}, Layout{5, 24, false}, Layout{0, 8, true}}) {
        SCOPED_TRACE(::testing::Message() << l.rows << " x " << l.width << ", " << name_of(dtype));
        const std::int64_t count = l.rows * l.width, stride = l.halves ? 2 * l.width : l.width;
        const std::int64_t up = l.halves ? l.width : count;  // where u starts in one array of both
        const Values both = rounded(random_values(2 * count, 1, 4.0), dtype);
        const Values d_y = rounded(random_values(count, 2), dtype);
        Values want_y, want_d(both.size());
        for (std::int64_t r = 0; r < l.rows; ++r) {
          for (std::int64_t i = 0; i < l.width; ++i) {
            const std::int64_t g_at = r * stride + i, u_at = up + g_at;
            const double g = at(both, g_at), u = at(both, u_at), h = 1e-5, d = at(d_y, r * l.width + i);
            want_y.push_back(activated(activation, g, u));
            want_d[static_cast<std::size_t>(g_at)] =
                d * (activated(activation, g + h, u) - activated(activation, g - h, u)) / (2 * h);
            want_d[static_cast<std::size_t>(u_at)] =
                d * (activated(activation, g, u + h) - activated(activation, g, u - h)) / (2 * h);
          }
        }
        const auto half = [&](Out whole) {
          return Out(static_cast<std::byte*>(whole.at()) + up * bytes_of(dtype), dtype);
        };
        const Out gu = upload(both, dtype), y = output(count, dtype), d = output(2 * count, dtype);
        const Out made = upload(d_y, dtype);  // the gradient makes way for the output
        ops().run(stream(), Glu{l.rows, l.width, activation, gu, stride, half(gu), stride, y});
        ops().run(stream(), GluBackward{l.rows, l.width, activation, gu, stride, half(gu), stride,
                                        upload(d_y, dtype), d, stride, half(d), stride});
        expect_near("y", y, want_y, output_tolerance(dtype));
        expect_near("d", d, want_d, gradient_tolerance(dtype));
        ops().run(stream(), GluBackward{l.rows, l.width, activation, gu, stride, half(gu), stride, made, gu,
                                        stride, half(gu), stride, made});
        expect_near("y made again", made, want_y, output_tolerance(dtype));
        expect_near("d in place", gu, want_d, gradient_tolerance(dtype));
      }
    }
  }
}

}  // namespace
}  // namespace terrace::trainer
