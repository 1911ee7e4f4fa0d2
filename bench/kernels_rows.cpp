// The memory-bound operators: traffic alone is the floor. Backward counts an array that is both read and
// written twice.
#include "bench/kernels.hpp"
#include "examples/moe_trainer/ops/attnres.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

constexpr Dtype kBf16 = Dtype::kBf16;
constexpr float kEps = 1e-6F;

// Wraps an operator made for one set of arrays into its launch.
template <typename Op>
Launch launch_of(KernelBench& bench, const Op& op) {
  return [op, &bench] { bench.ops().run(bench.stream(), op); };
}

struct Rows {
  std::int64_t rows, width;
  [[nodiscard]] std::int64_t count() const { return rows * width; }
  [[nodiscard]] double bytes() const { return 2.0 * static_cast<double>(count()); }  // in bf16
  [[nodiscard]] std::string name() const { return std::to_string(rows) + "x" + std::to_string(width); }
};

void add_attnres(KernelBench& bench, std::int64_t sources, const Rows& size) {
  const std::string name = std::to_string(sources) + "x" + size.name();
  const auto all = static_cast<double>(sources);
  bench.add({.name = "attnres/forward/" + name,
             .bytes = (all + 1) * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               AttnRes op{.rows = size.rows,
                          .width = size.width,
                          .sources = sources,
                          .eps = kEps,
                          .v = {},
                          .w = arrays.floats(size.width),
                          .q = arrays.floats(size.width, {.deviation = 0.01}),
                          .h = arrays.output(size.count(), kBf16)};
               for (std::int64_t l = 0; l < sources; ++l) op.v[l] = arrays.random(size.count(), kBf16);
               return launch_of(bench, op);
             }});
  bench.add({.name = "attnres/backward/" + name,
             .bytes = (2 * all + 1) * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               AttnResBackward op{.rows = size.rows,
                                  .width = size.width,
                                  .sources = sources,
                                  .eps = kEps,
                                  .v = {},
                                  .w = arrays.floats(size.width),
                                  .q = arrays.floats(size.width, {.deviation = 0.01}),
                                  .d_h = arrays.random(size.count(), kBf16),
                                  .d_v = {},
                                  .d_w = arrays.floats(size.width),
                                  .d_q = arrays.floats(size.width)};
               for (std::int64_t l = 0; l < sources; ++l) {
                 op.v[l] = arrays.random(size.count(), kBf16);
                 op.d_v[l] = arrays.output(size.count(), kBf16);
               }
               return launch_of(bench, op);
             }});
}

void add_norms(KernelBench& bench, const Rows& size) {
  bench.add({.name = "rms_norm/forward/" + size.name(),
             .bytes = 2 * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(bench,
                                RmsNorm{size.rows, size.width, kEps, arrays.random(size.count(), kBf16),
                                        arrays.floats(size.width), arrays.output(size.count(), kBf16)});
             }});
  bench.add({.name = "rms_norm/backward/" + size.name(),
             .bytes = 3 * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(bench, RmsNormBackward{.rows = size.rows,
                                                       .width = size.width,
                                                       .eps = kEps,
                                                       .x = arrays.random(size.count(), kBf16),
                                                       .w = arrays.floats(size.width),
                                                       .d_y = arrays.random(size.count(), kBf16),
                                                       .d_x = arrays.output(size.count(), kBf16),
                                                       .d_w = arrays.floats(size.width)});
             }});
}

void add_gated_norm(KernelBench& bench, const Rows& size) {
  bench.add({.name = "gated_rms_norm/forward/" + size.name(),
             .bytes = 3 * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(bench,
                                GatedRmsNorm{size.rows, size.width, kEps, arrays.random(size.count(), kBf16),
                                             arrays.floats(size.width), arrays.random(size.count(), kBf16),
                                             arrays.output(size.count(), kBf16)});
             }});
  bench.add({.name = "gated_rms_norm/backward/" + size.name(),
             .bytes = 5 * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(bench, GatedRmsNormBackward{.rows = size.rows,
                                                            .width = size.width,
                                                            .eps = kEps,
                                                            .o = arrays.random(size.count(), kBf16),
                                                            .w = arrays.floats(size.width),
                                                            .gate = arrays.random(size.count(), kBf16),
                                                            .d_y = arrays.random(size.count(), kBf16),
                                                            .d_o = arrays.output(size.count(), kBf16),
                                                            .d_gate = arrays.output(size.count(), kBf16),
                                                            .d_w = arrays.floats(size.width)});
             }});
}

void add_conv(KernelBench& bench, const Rows& size) {
  constexpr std::int64_t kTaps = 4;
  bench.add({.name = "causal_conv/forward/1x" + size.name() + "x4",
             .bytes = 2 * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(
                   bench, CausalConv{1, size.rows, size.width, kTaps, arrays.random(size.count(), kBf16),
                                     arrays.floats(size.width * kTaps), arrays.output(size.count(), kBf16)});
             }});
  bench.add({.name = "causal_conv/backward/1x" + size.name() + "x4",
             .bytes = 3 * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(
                   bench,
                   CausalConvBackward{1, size.rows, size.width, kTaps, arrays.random(size.count(), kBf16),
                                      arrays.floats(size.width * kTaps), arrays.random(size.count(), kBf16),
                                      arrays.output(size.count(), kBf16), arrays.floats(size.width * kTaps)});
             }});
}

void add_rotary(KernelBench& bench, std::int64_t tokens, std::int64_t heads) {
  constexpr std::int64_t kWidth = 64;
  const Rows size{tokens, heads * kWidth};
  bench.add({.name = "rotary/1x" + std::to_string(tokens) + "x" + std::to_string(heads) + "x64",
             .bytes = 2 * size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               const Out x = arrays.random(size.count(), kBf16);
               return launch_of(bench, Rotary{.batch = 1,
                                              .length = tokens,
                                              .heads = heads,
                                              .width = kWidth,
                                              .rotary_width = kWidth,
                                              .x = x,
                                              .y = x});
             }});
}

void add_embedding(KernelBench& bench, std::int64_t vocabulary, const Rows& size) {
  bench.add({.name = "embedding_backward/" + size.name() + "x" + std::to_string(vocabulary),
             .bytes = size.bytes() + 8.0 * static_cast<double>(size.count()),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               std::vector<std::int32_t> ids;
               for (std::int64_t t = 0; t < size.rows; ++t) {
                 ids.push_back(static_cast<std::int32_t>(t * t * 7919 % vocabulary));
               }
               return launch_of(bench, EmbeddingBackward{size.rows, size.width, vocabulary, arrays.ints(ids),
                                                         arrays.random(size.count(), kBf16),
                                                         arrays.floats(vocabulary * size.width)});
             }});
}

void add_optimizer(KernelBench& bench, std::int64_t count) {
  const auto numbers = static_cast<double>(count);
  bench.add({.name = "adamw/" + std::to_string(count),
             .bytes = 30 * numbers,
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(bench, AdamW{.count = count,
                                             .parameter = arrays.floats(count),
                                             .gradient = arrays.random(count, Dtype::kF32),
                                             .m = arrays.floats(count),
                                             .v = arrays.floats(count, {.deviation = 0.1, .mean = 1}),
                                             .learning_rate = 1e-4F,
                                             .beta1 = 0.9F,
                                             .beta2 = 0.95F,
                                             .eps = 1e-8F,
                                             .weight_decay = 0.1F,
                                             .step = 10,
                                             .sum_of_squares = nullptr,
                                             .clip_norm = 0,
                                             .compute_copy = arrays.output(count, kBf16)});
             }});
  bench.add(
      {.name = "sum_of_squares/" + std::to_string(count),
       .bytes = 4 * numbers,
       .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
         return launch_of(bench, SumOfSquares{count, arrays.random(count, Dtype::kF32), arrays.floats(1)});
       }});
}

void add_expert_rows(KernelBench& bench, std::int64_t top_k, const Rows& size) {
  const std::int64_t slots = size.rows * top_k;
  const std::string name = size.name() + "x" + std::to_string(top_k);
  const auto order = [=] {  // a permutation that sends a token's slots far apart
    std::vector<std::int32_t> row;
    for (std::int64_t i = 0; i < slots; ++i) {
      row.push_back(static_cast<std::int32_t>(i % top_k * size.rows + i / top_k));
    }
    return row;
  };
  const double spread = 2.0 * static_cast<double>(slots * size.width);
  bench.add({.name = "sum_rows/" + name,
             .bytes = spread + size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(bench, SumRows{size.rows, size.width, top_k, arrays.ints(order()),
                                               arrays.floats(slots), arrays.random(slots * size.width, kBf16),
                                               arrays.output(size.count(), kBf16)});
             }});
  bench.add({.name = "sum_rows_backward/" + name,
             .bytes = 2 * spread + size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               return launch_of(
                   bench, SumRowsBackward{
                              size.rows, size.width, top_k, arrays.ints(order()), arrays.floats(slots),
                              arrays.random(slots * size.width, kBf16), arrays.random(size.count(), kBf16),
                              arrays.output(slots * size.width, kBf16), arrays.float_output(slots)});
             }});
  bench.add({.name = "gather_rows/" + name,
             .bytes = spread + size.bytes(),
             .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
               std::vector<std::int32_t> source(static_cast<std::size_t>(slots));
               const std::vector<std::int32_t> row = order();
               for (std::int64_t i = 0; i < slots; ++i) {
                 const auto at = static_cast<std::size_t>(i);
                 source[static_cast<std::size_t>(row[at])] = static_cast<std::int32_t>(i);
               }
               return launch_of(bench, GatherRows{slots, size.width, top_k, arrays.ints(source),
                                                  arrays.random(size.count(), kBf16),
                                                  arrays.output(slots * size.width, kBf16)});
             }});
}

}  // namespace

void add_rows_cases(KernelBench& bench) {
  if (bench.tiny()) {
    add_attnres(bench, 3, {8, 64});
    add_norms(bench, {16, 64});
    add_gated_norm(bench, {16, 32});
    add_conv(bench, {16, 32});
    add_rotary(bench, 8, 2);
    add_embedding(bench, 50, {32, 16});
    add_optimizer(bench, 1000);
    return add_expert_rows(bench, 2, {16, 32});
  }
  add_attnres(bench, 9, {8192, 7168});
  add_norms(bench, {8192, 7168});
  add_norms(bench, {std::int64_t{8192} * 96, 128});
  add_gated_norm(bench, {std::int64_t{8192} * 96, 128});
  add_conv(bench, {8192, std::int64_t{96} * 128});
  add_rotary(bench, 8192, 64);
  add_embedding(bench, 163840, {16384, 4096});
  add_optimizer(bench, std::int64_t{1} << 28);
  add_expert_rows(bench, 8, {8192, 3584});
}

}  // namespace terrace::bench
