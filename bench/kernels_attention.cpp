// Dense causal attention, forward and backward, bf16. Shapes: batch x length x heads x key heads x key width
// x value width. The floor counts what the mathematics needs: two products forward, five backward, over the
// causal half.
#include "bench/kernels.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

std::string name_of_shape(const AttentionShape& s) {
  std::string name;
  for (const std::int64_t extent : {s.batch, s.length, s.heads, s.key_heads, s.key_width, s.value_width}) {
    name += (name.empty() ? "" : "x") + std::to_string(extent);
  }
  return name;
}

struct Work {
  double pairs;                       // of a query and a key, over all heads
  double queries, keys, values, out;  // numbers in each array
};
Work work_of(const AttentionShape& s) {
  const auto tokens = static_cast<double>(s.batch * s.length), heads = static_cast<double>(s.heads);
  const auto key_heads = static_cast<double>(s.key_heads);
  const auto key_width = static_cast<double>(s.key_width), value_width = static_cast<double>(s.value_width);
  return {tokens * heads * static_cast<double>(s.length + 1) / 2, tokens * heads * key_width,
          tokens * key_heads * key_width, tokens * key_heads * value_width, tokens * heads * value_width};
}

Attention make_forward(CaseArrays& arrays, const AttentionShape& s) {
  const std::int64_t tokens = s.batch * s.length;
  return {.shape = s,
          .q = arrays.random(tokens * s.heads * s.key_width, Dtype::kBf16),
          .k = arrays.random(tokens * s.key_heads * s.key_width, Dtype::kBf16),
          .v = arrays.random(tokens * s.key_heads * s.value_width, Dtype::kBf16),
          .sink = nullptr,
          .o = arrays.output(tokens * s.heads * s.value_width, Dtype::kBf16),
          .lse = arrays.float_output(tokens * s.heads)};
}

void add_shape(KernelBench& bench, const AttentionShape& s) {
  const Work work = work_of(s);
  const auto key_width = static_cast<double>(s.key_width), value_width = static_cast<double>(s.value_width);
  bench.add({.name = "forward/" + name_of_shape(s),
             .flops = 2 * work.pairs * (key_width + value_width),
             .bytes = 2 * (work.queries + work.keys + work.values + work.out),
             .prepare = [s, &bench](CaseArrays& arrays) -> Launch {
               const Attention op = make_forward(arrays, s);
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
  bench.add({.name = "backward/" + name_of_shape(s),
             .flops = 2 * work.pairs * (3 * key_width + 2 * value_width),
             .bytes = 2 * 2 * (work.queries + work.keys + work.values + work.out),
             .prepare = [s, &bench](CaseArrays& arrays) -> Launch {
               const Attention forward = make_forward(arrays, s);
               bench.ops().run(bench.stream(), forward);
               const std::int64_t tokens = s.batch * s.length;
               const AttentionBackward op{
                   .shape = s,
                   .q = forward.q,
                   .k = forward.k,
                   .v = forward.v,
                   .sink = nullptr,
                   .o = forward.o,
                   .lse = forward.lse,
                   .d_o = arrays.random(tokens * s.heads * s.value_width, Dtype::kBf16),
                   .d_q = arrays.output(tokens * s.heads * s.key_width, Dtype::kBf16),
                   .d_k = arrays.output(tokens * s.key_heads * s.key_width, Dtype::kBf16),
                   .d_v = arrays.output(tokens * s.key_heads * s.value_width, Dtype::kBf16)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

}  // namespace

void add_attention_cases(KernelBench& bench) {
  if (bench.tiny()) return add_shape(bench, {1, 96, 4, 2, 48, 32});
  add_shape(bench, {1, 8192, 32, 32, 128, 128});
  add_shape(bench, {1, 8192, 32, 8, 128, 128});
  add_shape(bench, {4, 4096, 32, 8, 64, 64});
  add_shape(bench, {1, 8192, 32, 32, 192, 128});
  add_shape(bench, {1, 32768, 16, 4, 128, 128});
}

}  // namespace terrace::bench
