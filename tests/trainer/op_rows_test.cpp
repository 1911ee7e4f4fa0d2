// Gathers and sums of rows: experts' rows with dropped slots, embedding, sums and conversions of arrays.
#include "examples/moe_trainer/random.hpp"
#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

class RowsOps : public OpsUnderTest {};
TERRACE_TEST_ON_EVERY_DEVICE(RowsOps);

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Slots {
  std::int64_t tokens, top_k, width;
};

TEST_P(RowsOps, DroppedSlotsAddNothingAndHaveNoGradient) {
  for (const Slots& s : {Slots{13, 3, 21}, Slots{40, 8, 264}, Slots{5, 1, 64}, Slots{0, 2, 8}}) {
    for (const Dtype dtype : kBothTypes) {
      SCOPED_TRACE(::testing::Message()
                   << s.tokens << " x " << s.top_k << " x " << s.width << " " << name_of(dtype));
      const std::int64_t slots = s.tokens * s.top_k;
      // Every fifth slot is dropped; the others take the rows in reverse.
      std::vector<std::int32_t> row(at(slots), -1), source;
      for (std::int64_t i = slots - 1; i >= 0; --i) {
        if (i % 5 == 2) continue;
        row[at(i)] = static_cast<std::int32_t>(source.size());
        source.push_back(static_cast<std::int32_t>(i));
      }
      const auto rows = static_cast<std::int64_t>(source.size());
      source.push_back(-1);
      const Values x = rounded(random_values(s.tokens * s.width, 1), dtype);
      const Values e = rounded(random_values(rows * s.width, 2), dtype), weight = random_values(slots, 3);
      const Values d_out = rounded(random_values(s.tokens * s.width, 4), dtype);
      Values gathered(at((rows + 1) * s.width)), sum(x.size()), d_e(e.size()), d_weight(weight.size());
      for (std::int64_t i = 0; i < slots; ++i) {
        if (row[at(i)] < 0) continue;
        for (std::int64_t c = 0; c < s.width; ++c) {
          const std::size_t in = at(i / s.top_k * s.width + c), out = at(row[at(i)] * s.width + c);
          gathered[out] = x[in];
          sum[in] += weight[at(i)] * e[out];
          d_e[out] = weight[at(i)] * d_out[in];
          d_weight[at(i)] += d_out[in] * e[out];
        }
      }
      const Out got = output((rows + 1) * s.width, dtype), summed = output(s.tokens * s.width, dtype);
      const Out e_at = upload(e, dtype), got_d_e = output(rows * s.width, dtype);
      float* got_d_weight = output(slots);
      ops().run(stream(), GatherRows{rows + 1, s.width, s.top_k, upload(source), upload(x, dtype), got});
      ops().run(stream(), SumRows{s.tokens, s.width, s.top_k, upload(row), upload(weight), e_at, summed});
      ops().run(stream(), SumRowsBackward{s.tokens, s.width, s.top_k, upload(row), upload(weight), e_at,
                                          upload(d_out, dtype), got_d_e, got_d_weight});
      expect_near("gathered", got, gathered, 0);
      expect_near("sum", summed, sum, output_tolerance(dtype));
      expect_near("d_x", got_d_e, d_e, gradient_tolerance(dtype));
      expect_near("d_weight", got_d_weight, d_weight, gradient_tolerance(dtype));
      const Out twice = upload(sum, dtype);
      ops().run(stream(), SumRows{s.tokens, s.width, s.top_k, upload(row), upload(weight), e_at, twice,
                                  Accumulate::kAdd});
      for (double& value : sum) value *= 2;
      expect_near("added", twice, sum, output_tolerance(dtype));
    }
  }
}

// More of x than one slab of columns takes: rows from far apart, and none.
TEST_P(RowsOps, GathersMoreThanTheCacheTakes) {
  const Slots s{1200, 2, 3600};
  const std::int64_t rows = 2 * s.tokens + 1;
  const Values x = random_values(s.tokens * s.width, 1);
  std::vector<std::int32_t> source(at(rows), -1);
  for (std::int64_t r = 0; r < rows; ++r) {
    if (r % 7 != 3) source[at(r)] = static_cast<std::int32_t>(r * 1001 % (2 * s.tokens));
  }
  Values want(at(rows * s.width));
  for (std::int64_t r = 0; r < rows; ++r) {
    if (source[at(r)] < 0) continue;
    std::copy_n(x.begin() + source[at(r)] / 2 * s.width, s.width, want.begin() + r * s.width);
  }
  const Out got = output(rows * s.width, Dtype::kF32);
  ops().run(stream(), GatherRows{rows, s.width, s.top_k, upload(source), upload(x, Dtype::kF32), got});
  expect_near("gathered", got, want, 1e-7);
}

// Few ids, all ids the same, many more ids than tokens: runs that cross many chunks, and none.
TEST_P(RowsOps, EmbeddingBackwardAddsInOrder) {
  struct Case {
    std::int64_t tokens, width, vocabulary;
    std::int32_t below;
  };
  for (const Case& c :
       {Case{1, 3, 5, 5}, Case{300, 24, 7, 7}, Case{333, 130, 163840, 163840}, Case{257, 16, 50, 1},
        Case{450, 1028, 300, 300}, Case{64, 8, 1000, 40}, Case{0, 8, 4, 4}}) {
    for (const Dtype dtype : kBothTypes) {
      SCOPED_TRACE(::testing::Message() << c.tokens << " of " << c.below << " " << name_of(dtype));
      if (c.vocabulary > 100'000 && dtype == Dtype::kF32) continue;
      std::vector<std::int32_t> ids = random_ints(c.tokens, 1, c.below);
      if (c.tokens > 1) ids[0] = ids[at(c.tokens - 1)] = c.below - 1;
      const Values d_out = rounded(random_values(c.tokens * c.width, 2), dtype);
      const Values table =
          rounded(random_values(std::min<std::int64_t>(c.vocabulary, 1000) * c.width, 3), dtype);
      Values want(at(c.vocabulary * c.width)), out(d_out.size());
      for (std::int64_t i = 0; i < c.tokens * c.width; ++i) {
        want[at(ids[at(i / c.width)] * c.width + i % c.width)] += d_out[at(i)];
        if (c.vocabulary <= 1000) out[at(i)] = table[at(ids[at(i / c.width)] * c.width + i % c.width)];
      }
      for (double& value : want) value += 0.25;
      float* d_table = upload(Values(want.size(), 0.25));
      float* again = upload(Values(want.size(), 0.25));
      const std::int32_t* ids_at = upload(ids);
      const Out d_out_at = upload(d_out, dtype);
      ops().run(stream(), EmbeddingBackward{c.tokens, c.width, c.vocabulary, ids_at, d_out_at, d_table});
      ops().run(stream(), EmbeddingBackward{c.tokens, c.width, c.vocabulary, ids_at, d_out_at, again});
      expect_near("d_table", d_table, want, kGradient);
      expect_same_bits("d_table", d_table, again, c.vocabulary * c.width);
      if (c.vocabulary > 1000) continue;
      const Out got = output(c.tokens * c.width, dtype);
      ops().run(stream(), Embedding{c.tokens, c.width, c.vocabulary, ids_at, upload(table, dtype), got});
      expect_near("out", got, out, 0);
    }
  }
}

TEST_P(RowsOps, AddsAndConvertsBetweenTypes) {
  for (const std::int64_t count : {0L, 1L, 7L, 4096L, 5003L}) {
    const Values x = random_values(count, 1), y = random_values(count, 2);
    for (const Dtype from : kBothTypes) {
      for (const Dtype to : kBothTypes) {
        SCOPED_TRACE(::testing::Message() << count << " " << name_of(from) << " to " << name_of(to));
        const Out a = upload(x, from), out = output(count, to);
        ops().run(stream(), Convert{count, a, out});
        expect_near("converted", out, rounded(rounded(x, from), to), 0);
        Values want = rounded(x, from);
        const float squares = static_cast<float>(inner(x, x));
        for (double& value : want) value *= -2 / (std::sqrt(static_cast<double>(squares)) + 1e-7);
        ops().run(stream(), Convert{count, a, out, -2.0F, upload(Values{squares})});
        if (count > 0) expect_near("by the root", out, want, output_tolerance(to));
        const Values first = rounded(x, from), second = rounded(y, to);
        for (std::size_t i = 0; i < want.size(); ++i) want[i] = 0.5 * first[i] - 3 * second[i];
        const Out b = upload(y, to);
        ops().run(stream(), Add{count, a, b, b, 0.5F, -3.0F});
        expect_near("sum", b, want, output_tolerance(to));
      }
    }
  }
  float* nothing = output(3);  // NaN that a factor of zero must not let through
  ops().run(stream(), Add{.count = 3, .out = nothing, .a_factor = 0, .b_factor = 0});
  expect_near("zeros", nothing, Values(3), 0);
}

// From anywhere, in any number: number i of a stream is what its seed, name and place make it.
TEST_P(RowsOps, RandomNumbersAreThoseOfTheirPlace) {
  const CounterRandom random({.seed = 7, .stream = "weights"});
  for (const std::int64_t count : {0L, 1L, 1000L, 70001L}) {
    for (const Dtype dtype : kBothTypes) {
      SCOPED_TRACE(::testing::Message() << count << " " << name_of(dtype));
      constexpr std::uint64_t kFirst = (1ULL << 33) + 5;
      Values normal(at(count)), uniform(at(count));
      for (std::int64_t i = 0; i < count; ++i) {
        const std::uint64_t place = kFirst + static_cast<std::uint64_t>(i);
        normal[at(i)] = 0.02 * random.normal(place);
        uniform[at(i)] = -1 + 4 * random.uniform(place);
      }
      const auto fill = [&](Draw draw, double a, double b) {
        const Out y = output(count, dtype);
        ops().run(stream(), RandomFill{count, random, kFirst, draw, a, b, y});
        return y;
      };
      const double tolerance = dtype == Dtype::kF32 ? 1e-7 : 4e-3;  // half a unit in the last place
      expect_near("normal", fill(Draw::kNormal, 0.02, 0), normal, tolerance);
      expect_near("uniform", fill(Draw::kUniform, -1, 3), uniform, tolerance);
      expect_near("constant", fill(Draw::kConstant, 0.5, 0), Values(at(count), 0.5), 0);
    }
  }
}

}  // namespace
}  // namespace terrace::trainer
