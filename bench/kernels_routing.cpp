// Routing: scores to experts, experts to rows, and their gradients. Traffic alone is the floor.
#include <random>

#include "bench/kernels.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

struct Size {
  std::int64_t tokens, experts, top_k, groups, top_groups;
  [[nodiscard]] std::string name() const {
    return std::to_string(tokens) + "x" + std::to_string(experts) + "x" + std::to_string(top_k);
  }
  [[nodiscard]] std::int64_t slots() const { return tokens * top_k; }
  [[nodiscard]] RouterShape shape() const {
    return {.tokens = tokens,
            .experts = experts,
            .top_k = top_k,
            .groups = groups,
            .top_groups = top_groups,
            .scaling = 2.5F};
  }
};

std::vector<std::int32_t> random_experts(const Size& size) {
  std::mt19937 bits(7);
  std::vector<std::int32_t> experts(static_cast<std::size_t>(size.slots()));
  for (std::int32_t& expert : experts) {
    // Some experts are hotter than others.
    const auto draw = [&] { return static_cast<std::int32_t>(bits() % static_cast<unsigned>(size.experts)); };
    expert = std::min(draw(), draw());
  }
  return experts;
}

void add_router(KernelBench& bench, const Size& size) {
  const double logits = 4.0 * static_cast<double>(size.tokens * size.experts);
  const double chosen = 8.0 * static_cast<double>(size.slots());
  bench.add({.name = "router/" + size.name(),
             .bytes = logits + chosen,
             .prepare = [size, &bench](CaseArrays& arrays) -> Launch {
               const Router op{size.shape(), arrays.floats(size.tokens * size.experts),
                               arrays.floats(size.experts, {.deviation = 0.05}),
                               arrays.int_output(size.slots()), arrays.float_output(size.slots())};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
  bench.add({.name = "router_backward/" + size.name(),
             .bytes = 2 * logits + chosen,
             .prepare = [size, &bench](CaseArrays& arrays) -> Launch {
               const RouterBackward op{size.shape(), arrays.floats(size.tokens * size.experts),
                                       arrays.ints(random_experts(size)), arrays.floats(size.slots()),
                                       arrays.float_output(size.tokens * size.experts)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

void add_permute(KernelBench& bench, const Size& size) {
  bench.add({.name = "permute/" + size.name(),
             .bytes = 12.0 * static_cast<double>(size.slots()),
             .prepare = [size, &bench](CaseArrays& arrays) -> Launch {
               const Permute op{size.tokens,
                                size.experts,
                                size.top_k,
                                arrays.ints(random_experts(size)),
                                arrays.int_output(size.experts + 1),
                                arrays.int_output(size.slots()),
                                arrays.int_output(size.slots())};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

}  // namespace

void add_routing_cases(KernelBench& bench) {
  const std::vector<Size> sizes = bench.tiny()
                                      ? std::vector<Size>{{64, 16, 4, 4, 2}}
                                      : std::vector<Size>{{8192, 256, 8, 8, 4}, {4096, 896, 16, 1, 1}};
  for (const Size& size : sizes) {
    add_router(bench, size);
    add_permute(bench, size);
  }
}

}  // namespace terrace::bench
