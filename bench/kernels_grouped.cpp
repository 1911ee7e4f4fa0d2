// Grouped products by expert: forward with and without the activation, both gradients; and the activation
// alone.
#include <utility>

#include "bench/kernels.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

enum class Spreading : std::uint8_t { kEven, kSkewed, kFew };

struct Shape {
  std::int64_t groups, rows_each, n, k;
  Spreading spreading = Spreading::kEven;

  [[nodiscard]] std::vector<std::int32_t> offsets() const {
    if (spreading == Spreading::kFew) return small_offsets(groups);
    if (spreading == Spreading::kSkewed) return skewed_offsets(groups, groups * rows_each);
    std::vector<std::int32_t> ends{0};
    for (std::int64_t g = 0; g < groups; ++g)
      ends.push_back(ends.back() + static_cast<std::int32_t>(rows_each));
    return ends;
  }
  [[nodiscard]] std::string name() const {
    const std::string rows = spreading == Spreading::kFew ? "1..64" : std::to_string(rows_each);
    const std::string tail = spreading == Spreading::kSkewed ? "/skewed" : "";
    return std::to_string(groups) + "x" + rows + "x" + std::to_string(n) + "x" + std::to_string(k) + tail;
  }
};

// What a product moves and computes, in bf16 with fp32 gradients of the weights.
struct Work {
  double rows, weights, flops;
};
Work work_of(const Shape& shape) {
  const auto rows = static_cast<double>(shape.offsets().back());
  const auto matrix = static_cast<double>(shape.n * shape.k);
  return {rows, static_cast<double>(shape.groups) * matrix, 2 * rows * matrix};
}

void add_products(KernelBench& bench, const Shape& shape) {
  const Work work = work_of(shape);
  const auto n = static_cast<double>(shape.n), k = static_cast<double>(shape.k);
  const auto make = [shape](CaseArrays& arrays, std::int64_t in, std::int64_t out) {
    const std::vector<std::int32_t> offsets = shape.offsets();
    const std::int64_t rows = offsets.back();
    return GroupedMatmul{.groups = shape.groups,
                         .rows = rows,
                         .n = shape.n,
                         .k = shape.k,
                         .offsets = arrays.ints(offsets),
                         .a = arrays.random(rows * in, Dtype::kBf16),
                         .w = arrays.random(shape.groups * shape.n * shape.k, Dtype::kBf16),
                         .c = arrays.output(rows * out, Dtype::kBf16)};
  };
  bench.add({.name = "forward/" + shape.name(),
             .flops = work.flops,
             .bytes = 2 * (work.weights + work.rows * (n + k)),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const GroupedMatmul op = make(arrays, shape.k, shape.n);
               return [op, &bench] { bench.ops().grouped_forward(bench.stream(), op); };
             }});
  bench.add({.name = "input_gradient/" + shape.name(),
             .flops = work.flops,
             .bytes = 2 * (work.weights + work.rows * (n + k)),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const GroupedMatmul op = make(arrays, shape.n, shape.k);
               return [op, &bench] { bench.ops().grouped_input_gradient(bench.stream(), op); };
             }});
  bench.add({.name = "weight_gradient/" + shape.name(),
             .flops = work.flops,
             .bytes = 4 * work.weights + 2 * work.rows * (n + k),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const std::vector<std::int32_t> offsets = shape.offsets();
               const std::int64_t rows = offsets.back();
               const GroupedWeightGradient op{.groups = shape.groups,
                                              .rows = rows,
                                              .n = shape.n,
                                              .k = shape.k,
                                              .offsets = arrays.ints(offsets),
                                              .d_c = arrays.random(rows * shape.n, Dtype::kBf16),
                                              .a = arrays.random(rows * shape.k, Dtype::kBf16),
                                              .d_w = arrays.float_output(shape.groups * shape.n * shape.k)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

// shape.n columns of weights: half of them gate, half up.
void add_activated(KernelBench& bench, const Shape& shape) {
  const Work work = work_of(shape);
  const auto n = static_cast<double>(shape.n), k = static_cast<double>(shape.k);
  bench.add({.name = "forward_situ/" + shape.name(),
             .flops = work.flops,
             .bytes = 2 * (work.weights + work.rows * (k + 1.5 * n)),
             .prepare = [shape, &bench](CaseArrays& arrays) -> Launch {
               const std::vector<std::int32_t> offsets = shape.offsets();
               const std::int64_t rows = offsets.back();
               const GroupedGlu op{.groups = shape.groups,
                                   .rows = rows,
                                   .n = shape.n / 2,
                                   .k = shape.k,
                                   .activation = GluActivation::kSitu,
                                   .offsets = arrays.ints(offsets),
                                   .a = arrays.random(rows * shape.k, Dtype::kBf16),
                                   .w = arrays.random(shape.groups * shape.n * shape.k, Dtype::kBf16),
                                   .y = arrays.output(rows * shape.n / 2, Dtype::kBf16),
                                   .gu = arrays.output(rows * shape.n, Dtype::kBf16)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

void add_activation(KernelBench& bench, std::int64_t rows, std::int64_t width) {
  const std::string size = "/" + std::to_string(rows) + "x" + std::to_string(width);
  const double numbers = 2.0 * static_cast<double>(rows * width);
  const auto up = [width](In gu) { return In(gu.as<Bf16>() + width); };
  for (const auto& [activation, name] :
       {std::pair{GluActivation::kSitu, "situ"}, std::pair{GluActivation::kSwi, "swiglu"}}) {
    bench.add({.name = std::string(name) + size,
               .bytes = 3 * numbers,
               .prepare = [=, &bench, activation = activation](CaseArrays& arrays) -> Launch {
                 const In gu = arrays.random(2 * rows * width, Dtype::kBf16);
                 const Glu op{rows,      width,  activation, gu,
                              2 * width, up(gu), 2 * width,  arrays.output(rows * width, Dtype::kBf16)};
                 return [op, &bench] { bench.ops().run(bench.stream(), op); };
               }});
    bench.add({.name = std::string(name) + "_backward" + size,
               .bytes = 5 * numbers,
               .prepare = [=, &bench, activation = activation](CaseArrays& arrays) -> Launch {
                 const In gu = arrays.random(2 * rows * width, Dtype::kBf16);
                 const Out d = arrays.output(2 * rows * width, Dtype::kBf16);
                 const GluBackward op{.rows = rows,
                                      .width = width,
                                      .activation = activation,
                                      .g = gu,
                                      .g_stride = 2 * width,
                                      .u = up(gu),
                                      .u_stride = 2 * width,
                                      .d_y = arrays.random(rows * width, Dtype::kBf16),
                                      .d_g = d,
                                      .d_g_stride = 2 * width,
                                      .d_u = Out(d.as<Bf16>() + width),
                                      .d_u_stride = 2 * width};
                 return [op, &bench] { bench.ops().run(bench.stream(), op); };
               }});
  }
}

}  // namespace

void add_grouped_cases(KernelBench& bench) {
  if (bench.tiny()) {
    for (const Spreading spreading : {Spreading::kEven, Spreading::kSkewed, Spreading::kFew}) {
      add_products(bench, {4, 8, 32, 48, spreading});
      add_activated(bench, {4, 8, 32, 48, spreading});
    }
    add_activation(bench, 16, 24);
    return;
  }
  for (const Spreading spreading : {Spreading::kEven, Spreading::kSkewed}) {
    for (Shape shape : {Shape{128, 512, 1536, 2048}, Shape{112, 1024, 6144, 3584},
                        Shape{16, 4096, 4096, 7168}, Shape{64, 256, 2048, 2048}}) {
      shape.spreading = spreading;
      add_products(bench, shape);
      add_activated(bench, shape);
    }
  }
  for (Shape shape : {Shape{14, 0, 2048, 2048}, Shape{14, 0, 6144, 3584}, Shape{896, 0, 2048, 2048}}) {
    shape.spreading = Spreading::kFew;
    add_products(bench, shape);
    add_activated(bench, shape);
  }
  add_activation(bench, 65536, 2048);
}

}  // namespace terrace::bench
