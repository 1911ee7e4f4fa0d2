#include "tests/trainer/ops_fixture.hpp"

namespace terrace::trainer {
namespace {

constexpr auto kNo = Transpose::kNo;
constexpr auto kYes = Transpose::kYes;

class MatmulOps : public OpsUnderTest {};
TERRACE_TEST_ON_EVERY_DEVICE(MatmulOps);

// What the operator sees of the inputs, and C in the type asked for.
struct Types {
  Dtype in, out;
};
constexpr Types kTypes[] = {
    {Dtype::kF32, Dtype::kF32}, {Dtype::kBf16, Dtype::kBf16}, {Dtype::kBf16, Dtype::kF32}};

TEST_P(MatmulOps, EveryTransposeAndRaggedShape) {
  const std::int64_t shapes[][3] = {
      {1, 1, 1},     {1, 37, 5},     {33, 1, 17},   {64, 96, 32}, {130, 47, 61},
      {5, 200, 301}, {128, 264, 72}, {61, 545, 530}};  // several blocks of columns and of depth
  std::uint64_t seed = 1;
  for (const auto& [m, n, k] : shapes) {
    for (const Types& types : kTypes) {
      for (const Transpose ta : {kNo, kYes}) {
        for (const Transpose tb : {kNo, kYes}) {
          const Values a = rounded(random_values(m * k, ++seed), types.in);
          const Values b = rounded(random_values(k * n, ++seed), types.in);
          const Values before = rounded(random_values(m * n, ++seed), types.out);
          const Values product = oracle::matmul({m, n, k, ta, tb}, a, b);
          const Out c = output(m * n, types.out), added = upload(before, types.out);
          const In left = upload(a, types.in), right = upload(b, types.in);
          ops().run(stream(), Matmul{m, n, k, left, ta, right, tb, c});
          ops().run(stream(), Matmul{m, n, k, left, ta, right, tb, added, Accumulate::kAdd});
          Values sum = product;
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += before[i];
          SCOPED_TRACE(::testing::Message() << m << " x " << n << " x " << k << ", " << name_of(types.in)
                                            << " to " << name_of(types.out));
          expect_near("overwritten", c, product, output_tolerance(types.out));
          expect_near("added", added, sum, output_tolerance(types.out));
        }
      }
    }
  }
}

TEST_P(MatmulOps, NothingToSum) {
  for (const Types& types : kTypes) {
    const Out c = output(15, types.out), kept = upload(Values(15, 0.5), types.out);
    const In none = upload(Values{}, types.in);
    ops().run(stream(), Matmul{3, 5, 0, none, kNo, none, kNo, c});
    ops().run(stream(), Matmul{3, 5, 0, none, kNo, none, kNo, kept, Accumulate::kAdd});
    expect_near("zero", c, Values(15, 0.0), 0);
    expect_near("kept", kept, Values(15, 0.5), 0);
  }
}

TEST_P(MatmulOps, SameBitsAgain) {
  const std::int64_t m = 300, n = 129, k = 257;
  for (const Types& types : kTypes) {
    const In a = upload(random_values(m * k, 1), types.in), b = upload(random_values(k * n, 2), types.in);
    const Out first = output(m * n, types.out);
    ops().run(stream(), Matmul{m, n, k, a, kNo, b, kNo, first});
    for (int run = 0; run < 5; ++run) {
      const Out again = output(m * n, types.out);
      ops().run(stream(), Matmul{m, n, k, a, kNo, b, kNo, again});
      expect_same_bits("again", again, first, m * n);
    }
  }
}

TEST_P(MatmulOps, MeasuresItsSpeed) { EXPECT_GT(ops().gemm_flops_per_second(256, 64), 0.0); }

}  // namespace
}  // namespace terrace::trainer
