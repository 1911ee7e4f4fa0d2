// Grouped products of 8-bit numbers, and how those are made of bf16. A product counts half its operations:
// the matrix units take 8-bit numbers at twice the rate of bf16.
#include <utility>

#include "bench/kernels.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

struct Shape {
  std::int64_t groups, rows_each, n, k;

  [[nodiscard]] std::int64_t rows() const { return groups * rows_each; }
  [[nodiscard]] std::int64_t weights() const { return groups * n * k; }
  [[nodiscard]] std::vector<std::int32_t> offsets() const {
    std::vector<std::int32_t> ends{0};
    for (std::int64_t g = 0; g < groups; ++g)
      ends.push_back(ends.back() + static_cast<std::int32_t>(rows_each));
    return ends;
  }
  [[nodiscard]] std::string name() const {
    return std::to_string(groups) + "x" + std::to_string(rows_each) + "x" + std::to_string(n) + "x" +
           std::to_string(k);
  }
};

// Room for 8-bit numbers.
E4m3* codes(CaseArrays& arrays, std::int64_t count) {
  return arrays.output((count + 1) / 2, Dtype::kBf16).as<E4m3>();
}

QuantiseRows random_rows(CaseArrays& arrays, std::int64_t rows, std::int64_t width) {
  return {rows, width, arrays.random(rows * width, Dtype::kBf16), codes(arrays, rows * width),
          arrays.float_output(rows)};
}

// `sizes`: as the product sees them; the input gradient has n and k the other way round.
void add_product(KernelBench& bench, const std::string& name, const Shape& sizes) {
  const auto rows = static_cast<double>(sizes.rows()), weights = static_cast<double>(sizes.weights());
  const auto n = static_cast<double>(sizes.n), k = static_cast<double>(sizes.k);
  bench.add({.name = name,
             .flops = rows * n * k,
             .bytes = weights + rows * (k + 2 * n),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const QuantiseRows a = random_rows(arrays, sizes.rows(), sizes.k);
               const QuantiseRows w = random_rows(arrays, sizes.groups * sizes.n, sizes.k);
               bench.ops().run(bench.stream(), a);
               bench.ops().run(bench.stream(), w);
               const GroupedMatmulFp8 op{.groups = sizes.groups,
                                         .rows = sizes.rows(),
                                         .n = sizes.n,
                                         .k = sizes.k,
                                         .offsets = arrays.ints(sizes.offsets()),
                                         .a = a.q,
                                         .a_scale = a.scale,
                                         .w = w.q,
                                         .w_scale = w.scale,
                                         .c = arrays.output(sizes.rows() * sizes.n, Dtype::kBf16)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

void add_rows(KernelBench& bench, std::int64_t rows, std::int64_t width) {
  bench.add({.name = "quantise_rows/" + std::to_string(rows) + "x" + std::to_string(width),
             .bytes = 3.0 * static_cast<double>(rows * width),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const QuantiseRows op = random_rows(arrays, rows, width);
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

// Both copies: weights are read twice, for a scale is known once all of its numbers are.
void add_weights(KernelBench& bench, const Shape& s) {
  bench.add({.name = "quantise_weights/" + std::to_string(s.groups) + "x" + std::to_string(s.n) + "x" +
                     std::to_string(s.k),
             .bytes = 6.0 * static_cast<double>(s.weights()),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const QuantiseWeights op{.groups = s.groups,
                                        .n = s.n,
                                        .k = s.k,
                                        .w = arrays.random(s.weights(), Dtype::kBf16),
                                        .q = codes(arrays, s.weights()),
                                        .scale = arrays.float_output(s.groups * s.n),
                                        .q_turned = codes(arrays, s.weights()),
                                        .turned_scale = arrays.float_output(s.groups * s.k)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

}  // namespace

void add_fp8_cases(KernelBench& bench) {
  std::vector<Shape> shapes = {
      {128, 512, 1536, 2048}, {112, 1024, 6144, 3584}, {16, 4096, 4096, 7168}, {64, 256, 2048, 2048}};
  if (bench.tiny()) shapes = {{4, 8, 32, 48}};
  for (const Shape& shape : shapes) {
    add_product(bench, "forward/" + shape.name(), shape);
    Shape back = shape;
    std::swap(back.n, back.k);
    add_product(bench, "input_gradient/" + shape.name(), back);
    add_rows(bench, shape.rows(), shape.k);
    add_weights(bench, shape);
  }
}

}  // namespace terrace::bench
