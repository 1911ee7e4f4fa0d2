// Blocks of 8-bit whole numbers, to the bit, against the definition in float64.
#include <cmath>
#include <limits>

#include "examples/moe_trainer/ops/quantised.hpp"
#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

// What the definition makes of rows of numbers that are exactly fp32.
struct Blocks {
  std::vector<int> q;
  Values scale;
};
Blocks quantise(const Values& x, std::int64_t width) {
  Blocks made;
  const auto rows = static_cast<std::int64_t>(x.size()) / width;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t first = 0; first < width; first += 128) {
      const std::int64_t begin = row * width + first;
      const std::int64_t end = row * width + std::min(width, first + 128);
      double amax = 0;
      bool finite = true;
      for (std::int64_t i = begin; i < end; ++i) {
        const double size = std::fabs(x[static_cast<std::size_t>(i)]);
        finite = finite && std::isfinite(size);
        amax = std::max(amax, size);
      }
      amax = std::max(amax, 0x1p-100);
      const auto factor = static_cast<double>(static_cast<float>(127 / amax));
      made.scale.push_back(finite ? static_cast<double>(static_cast<float>(amax / 127)) : std::nan(""));
      for (std::int64_t i = begin; i < end; ++i) {
        const double product =
            static_cast<double>(static_cast<float>(x[static_cast<std::size_t>(i)] * factor));
        made.q.push_back(finite ? static_cast<int>(std::nearbyint(product)) : 0);
      }
    }
  }
  return made;
}

struct Shape {
  std::int64_t rows, width;
};
const std::vector<Shape> kShapes = {{0, 16},  {1, 1},    {3, 127},  {5, 128},
                                    {7, 129}, {33, 132}, {9, 1000}, {130, 256}};

// Random numbers, and rows that are special.
Values rows_of_every_kind(const Shape& shape, Dtype dtype) {
  Values x = random_values(shape.rows * shape.width, 5);
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    for (std::int64_t i = 0; i < shape.width; ++i) {
      double& value = x[static_cast<std::size_t>(row * shape.width + i)];
      if (row % 8 == 1) value = i % 2 == 0 ? 0.0 : -0.0;
      if (row % 8 == 2 && i == shape.width / 2) value = std::nan("");
      if (row % 8 == 3 && i == shape.width - 1) value = -std::numeric_limits<double>::infinity();
      if (row % 8 == 4) value *= 0x1p-118;
      if (row % 8 == 5) value *= 0x1p120;
      if (row % 8 == 6) value = static_cast<double>(i % 255 - 127) / 2;  // halves: ties
    }
  }
  return rounded(x, dtype);
}

class QuantisedOps : public OpsUnderTest {
 protected:
  struct Made {
    std::int8_t* q;
    float* scale;
  };
  Made room(const Shape& s) {
    return {output((s.rows * s.width + 1) / 2, Dtype::kBf16).as<std::int8_t>(),
            output(s.rows * blocks_of(s.width))};
  }
  std::vector<int> numbers(const Made& made, const Shape& s) {
    std::vector<int> all;
    const auto bytes = bench().bits(In(reinterpret_cast<const Bf16*>(made.q)), (s.rows * s.width + 1) / 2);
    for (std::int64_t i = 0; i < s.rows * s.width; ++i) {
      all.push_back(static_cast<std::int8_t>(bytes[static_cast<std::size_t>(i)]));
    }
    return all;
  }
  static void expect_same(const Values& got, const Values& want) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) << i << ": " << got[i];
    }
  }
};
TERRACE_TEST_ON_EVERY_DEVICE(QuantisedOps);

TEST_P(QuantisedOps, BlocksAreMadeAndUndoneToTheBit) {
  for (const Dtype dtype : kBothTypes) {
    for (const Shape& s : kShapes) {
      SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.width << " in " << name_of(dtype));
      const Values x = rows_of_every_kind(s, dtype);
      const Blocks want = quantise(x, s.width);
      const Made made = room(s);
      ops().run(stream(), QuantiseBlocks{s.rows, s.width, upload(x, dtype), made.q, made.scale});
      EXPECT_TRUE(numbers(made, s) == want.q);
      expect_same(download(made.scale, s.rows * blocks_of(s.width)), want.scale);

      const Out back = output(s.rows * s.width, dtype);
      ops().run(stream(), DequantiseBlocks{s.rows, s.width, made.q, made.scale, back});
      Values expected;
      for (std::int64_t i = 0; i < s.rows * s.width; ++i) {
        const std::int64_t block = i / s.width * blocks_of(s.width) + i % s.width / 128;
        expected.push_back(want.q[static_cast<std::size_t>(i)] * want.scale[static_cast<std::size_t>(block)]);
      }
      expect_same(download(back, s.rows * s.width), rounded(expected, dtype));
    }
  }
}

// Experts in blocks are widened and multiplied some at a time: offsets then begin within the rows.
TEST_P(QuantisedOps, PiecesOfAStackAddUpToTheWhole) {
  constexpr std::int64_t kGroups = 7, kOut = 136, kIn = 72, kTogether = 3;
  const std::vector<std::int32_t> offsets = {0, 0, 5, 70, 71, 200, 200, 331};
  const std::int64_t rows = offsets.back();
  for (const Dtype dtype : kBothTypes) {
    SCOPED_TRACE(name_of(dtype));
    const In w = upload(random_values(kGroups * kOut * kIn, 2), dtype);
    GroupedMatmul op{.groups = kGroups,
                     .rows = rows,
                     .n = kOut,
                     .k = kIn,
                     .offsets = upload(offsets),
                     .a = nullptr,
                     .w = w,
                     .c = nullptr};
    const auto in_pieces = [&](const auto& run) {
      for (std::int64_t first = 0; first < kGroups; first += kTogether) {
        GroupedMatmul piece = op;
        piece.groups = std::min(kTogether, kGroups - first);
        piece.offsets += first;
        piece.w = {w.as<std::byte>() + first * kOut * kIn * bytes_of(dtype), dtype};
        run(piece);
      }
    };
    for (const bool forward : {true, false}) {
      const std::int64_t out_width = forward ? kOut : kIn;
      op.a = upload(random_values(rows * (forward ? kIn : kOut), 3), dtype);
      const auto run = [&](const GroupedMatmul& each) {
        forward ? ops().grouped_forward(stream(), each) : ops().grouped_input_gradient(stream(), each);
      };
      const Out whole = output(rows * out_width, dtype);
      op.c = whole;
      run(op);
      const Out pieces = output(rows * out_width, dtype);
      op.c = pieces;
      in_pieces(run);
      expect_near(forward ? "forward" : "input gradient", pieces, download(whole, rows * out_width),
                  output_tolerance(dtype));
    }
  }
}

// What a checkpoint's reader makes on the host is what the device makes.
TEST_P(QuantisedOps, TheHostMakesTheSameBits) {
  const Shape s{9, 1000};
  const Values x = rows_of_every_kind(s, Dtype::kF32);
  const std::vector<float> on_host(x.begin(), x.end());
  std::vector<std::int8_t> q(x.size());
  std::vector<float> scale(static_cast<std::size_t>(s.rows * blocks_of(s.width)));
  quantise_blocks({s.rows, s.width, on_host.data(), q.data(), scale.data()});
  const Blocks want = quantise(x, s.width);
  EXPECT_TRUE(std::vector<int>(q.begin(), q.end()) == want.q);
  expect_same({scale.begin(), scale.end()}, want.scale);
}

}  // namespace
}  // namespace terrace::trainer
