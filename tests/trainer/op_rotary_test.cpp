#include "tests/trainer/ops_fixture.hpp"
#include "tests/trainer/oracle_rows.hpp"

namespace terrace::trainer {
namespace {

class RotaryOps : public OpsUnderTest {
 protected:
  struct Case {
    std::int64_t batch, length, heads, width, offset, rotary_width, stride;
  };
  // (B, T, stride), every head turned at its token's position; what lies between rows stays.
  static Values turned(const Case& c, RotaryLayout layout, double theta, const Values& x,
                       const std::vector<double>& positions) {
    Values y = x;
    for (std::size_t t = 0; t < positions.size(); ++t) {
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const auto first = static_cast<std::int64_t>(t) * c.stride + h * c.width;
        const Values head(x.begin() + first, x.begin() + first + c.width);
        const Values after =
            oracle::rotary({c.width, c.offset, c.rotary_width, layout, theta}, head, positions[t]);
        std::copy(after.begin(), after.end(), y.begin() + first);
      }
    }
    return y;
  }
  Rotary op_of(const Case& c, RotaryLayout layout, Out x, Out y) {
    return {.batch = c.batch,
            .length = c.length,
            .heads = c.heads,
            .width = c.width,
            .offset = c.offset,
            .rotary_width = c.rotary_width,
            .layout = layout,
            .theta = 10000.0,
            .x = x,
            .y = y,
            .x_stride = c.stride,
            .y_stride = c.stride};
  }
  // Whole heads, a part of them behind others (MLA), one pair, strides that 16 bytes do not divide.
  static constexpr Case kCases[] = {{1, 1, 1, 2, 0, 2, 2},        {2, 5, 3, 16, 0, 16, 48},
                                    {1, 9, 2, 192, 128, 64, 384}, {2, 7, 4, 12, 2, 6, 51},
                                    {1, 33, 1, 64, 0, 64, 80},    {1, 3, 2, 32, 8, 16, 64}};
  static constexpr RotaryLayout kLayouts[] = {RotaryLayout::kHalf, RotaryLayout::kInterleaved};
};
TERRACE_TEST_ON_EVERY_DEVICE(RotaryOps);

TEST_P(RotaryOps, TurnsThereAndBack) {
  for (const Case& c : kCases) {
    for (const RotaryLayout layout : kLayouts) {
      for (const Dtype dtype : kBothTypes) {
        SCOPED_TRACE(::testing::Message() << c.width << " wide, " << c.rotary_width << " turn, layout "
                                          << static_cast<int>(layout) << ", " << name_of(dtype));
        const std::int64_t count = c.batch * c.length * c.stride;
        const Values x = rounded(random_values(count, 1), dtype);
        std::vector<double> positions;
        for (std::int64_t t = 0; t < c.batch * c.length; ++t) {
          positions.push_back(static_cast<double>(t % c.length));
        }
        const Values want = turned(c, layout, 10000.0, x, positions);
        // Out of place, into an array that has x between the rows already.
        const Out from = upload(x, dtype), to = upload(x, dtype);
        Rotary op = op_of(c, layout, from, to);
        ops().run(stream(), op);
        expect_near("turned", to, want, output_tolerance(dtype));
        op.x = to;
        op.direction = RotaryDirection::kInverse;
        ops().run(stream(), op);  // in place
        expect_near("back", to, x, output_tolerance(dtype));
      }
    }
  }
}

TEST_P(RotaryOps, PositionsUpToAMillionAndATable) {
  const Case c{1, 4, 2, 8, 0, 8, 16};
  const std::vector<std::int32_t> positions{0, 999'999, 1'048'575, 123'457};
  const Values x = random_values(c.length * c.stride, 1);
  const std::vector<double> as_double(positions.begin(), positions.end());
  Rotary op = op_of(c, RotaryLayout::kHalf, upload(x), output(c.length * c.stride));
  op.positions = upload(positions);
  ops().run(stream(), op);
  expect_near("theta", op.y, turned(c, RotaryLayout::kHalf, 10000.0, x, as_double), kOutput);
  // Powers of 1/4 are exact: the table of theta 256.
  op.frequency = upload(Values{1, 0.25, 0.0625, 0.015625});
  op.factor = 2.0F;
  ops().run(stream(), op);
  Values want = turned(c, RotaryLayout::kHalf, 256.0, x, as_double);
  for (double& value : want) value *= 2;
  expect_near("table", op.y, want, kOutput);
}

TEST_P(RotaryOps, PackedSequencesStartAtZero) {
  const Case c{1, 7, 1, 8, 0, 8, 8};
  const Values x = random_values(56, 1);
  Rotary op = op_of(c, RotaryLayout::kInterleaved, upload(x), output(56));
  op.packing = {4, upload(std::vector<std::int32_t>{0, 1, 5, 5, 7})};
  ops().run(stream(), op);
  expect_near("y", op.y, turned(c, RotaryLayout::kInterleaved, 10000.0, x, {0, 0, 1, 2, 3, 0, 1}), kOutput);
}

TEST_P(RotaryOps, PartsThatDoNotFitThrow) {
  Rotary op = op_of({1, 1, 1, 8, 0, 8, 8}, RotaryLayout::kHalf, zeros(8), zeros(8));
  op.rotary_width = 7;
  EXPECT_THROW(ops().run(stream(), op), std::runtime_error);
  op.rotary_width = 8;
  op.offset = 2;
  EXPECT_THROW(ops().run(stream(), op), std::runtime_error);
}

}  // namespace
}  // namespace terrace::trainer
