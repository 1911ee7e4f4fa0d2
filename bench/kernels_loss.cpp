// Linear cross entropy: three products of tokens by width by vocabulary with gradients, one without.
#include <random>

#include "bench/kernels.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

struct Size {
  std::int64_t tokens, width, vocabulary;
  [[nodiscard]] std::string name() const {
    return std::to_string(tokens) + "x" + std::to_string(width) + "x" + std::to_string(vocabulary);
  }
  [[nodiscard]] double product_flops() const {
    return 2.0 * static_cast<double>(tokens) * static_cast<double>(width) * static_cast<double>(vocabulary);
  }
};

std::vector<std::int32_t> random_labels(const Size& size) {
  std::mt19937 bits(11);
  std::vector<std::int32_t> labels(static_cast<std::size_t>(size.tokens));
  for (std::int32_t& label : labels) {
    label = static_cast<std::int32_t>(bits() % static_cast<std::uint64_t>(size.vocabulary));
  }
  return labels;
}

LinearCrossEntropy forward_op(const Size& size, Dtype dtype, CaseArrays& arrays) {
  return {.tokens = size.tokens,
          .width = size.width,
          .vocabulary = size.vocabulary,
          .hidden = arrays.random(size.tokens * size.width, dtype),
          .weight = arrays.random(size.vocabulary * size.width, dtype, {.deviation = 0.02}),
          .labels = arrays.ints(random_labels(size)),
          .gradient_scale = 1.0F / static_cast<float>(size.tokens),
          .loss_sum = arrays.floats(1),
          .d_hidden = nullptr,
          .d_weight = nullptr};
}

void add_size(KernelBench& bench, const Size& size, Dtype dtype) {
  const std::string suffix = size.name() + (dtype == Dtype::kF32 ? "/fp32" : "");
  const auto hidden = static_cast<double>(size.tokens * size.width);
  const auto weight = static_cast<double>(size.vocabulary * size.width);
  const auto element = static_cast<double>(bytes_of(dtype));
  bench.add({.name = "forward/" + suffix,
             .flops = size.product_flops(),
             .bytes = element * (hidden + weight),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const LinearCrossEntropy op = forward_op(size, dtype, arrays);
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
  bench.add({.name = "forward_backward/" + suffix,
             .flops = 3 * size.product_flops(),
             .bytes = element * (2 * hidden + weight) + 2 * 4 * weight,  // d_weight adds
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               LinearCrossEntropy op = forward_op(size, dtype, arrays);
               op.d_hidden = arrays.output(size.tokens * size.width, dtype);
               op.d_weight = arrays.float_output(size.vocabulary * size.width);
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

}  // namespace

void add_loss_cases(KernelBench& bench) {
  if (bench.tiny()) return add_size(bench, {.tokens = 64, .width = 48, .vocabulary = 500}, Dtype::kBf16);
  add_size(bench, {.tokens = 16384, .width = 4096, .vocabulary = 163840}, Dtype::kBf16);
  add_size(bench, {.tokens = 4096, .width = 4096, .vocabulary = 1 << 20}, Dtype::kBf16);
  add_size(bench, {.tokens = 4096, .width = 2048, .vocabulary = 32000}, Dtype::kBf16);
  add_size(bench, {.tokens = 2048, .width = 2048, .vocabulary = 32000}, Dtype::kF32);
}

}  // namespace terrace::bench
