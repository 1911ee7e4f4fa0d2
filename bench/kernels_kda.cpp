// The gated delta rule, forward and backward, bf16, 128 wide. FLOPs are those of chunks of 64 rows, the work
// any chunked form shares; bytes are every input once and every output once.
#include <string>

#include "bench/kernels.hpp"

namespace terrace::bench {
namespace {

using namespace trainer;

KdaShape shape_of(std::int64_t batch, std::int64_t length, std::int64_t heads) {
  return {batch, length, heads, heads, 128, 128};
}
std::string name_of(const char* pass, const KdaShape& s) {
  return std::string(pass) + "/" + std::to_string(s.batch) + "x" + std::to_string(s.length) + "x" +
         std::to_string(s.value_heads) + "x" + std::to_string(s.key_width);
}
double rows_of(const KdaShape& s) { return static_cast<double>(s.batch * s.length * s.value_heads); }

// A row of one head, K = V = 128, C = 64: products with the state 3 K V, inside the chunk C (3 K + V) / 2.
constexpr double kForwardFlops = 2.0 * (3 * 128 * 128 + 64 * (3 * 128 + 128) / 2.0);
// The forward's again but for o, then 7 K V, inside C (6 K + 4 V) / 2.
constexpr double kBackwardFlops =
    2.0 * (2 * 128 * 128 + 64 * (3 * 128) / 2.0 + 7 * 128 * 128 + 64 * (10 * 128) / 2.0);
// q, k, v, z, o; beta is one number a row.
constexpr double kForwardBytes = 2.0 * (5 * 128 + 1);
// q, k, v, z, do, beta and the gradients of all but do.
constexpr double kBackwardBytes = 2.0 * (9 * 128 + 2);

KdaInputs inputs(const KdaShape& s, CaseArrays& arrays) {
  const std::int64_t heads = s.batch * s.length * s.value_heads, count = heads * s.key_width;
  return {.q = arrays.random(count, Dtype::kBf16),
          .k = arrays.random(count, Dtype::kBf16),
          .v = arrays.random(count, Dtype::kBf16),
          .gate = arrays.random(count, Dtype::kBf16, {.deviation = 1, .mean = -3}),
          .beta = arrays.random(heads, Dtype::kBf16),
          .a_log = arrays.floats(s.value_heads, {.deviation = 0.3}),
          .dt_bias = arrays.floats(s.value_heads * s.key_width)};
}

void add_forward(KernelBench& bench, const KdaShape& s) {
  bench.add({.name = name_of("forward", s),
             .flops = rows_of(s) * kForwardFlops,
             .bytes = rows_of(s) * kForwardBytes,
             .prepare = [s, &bench](CaseArrays& arrays) -> Launch {
               const Kda op{s, inputs(s, arrays),
                            arrays.output(s.batch * s.length * s.value_heads * s.value_width, Dtype::kBf16)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

void add_backward(KernelBench& bench, const KdaShape& s) {
  bench.add({.name = name_of("backward", s),
             .flops = rows_of(s) * kBackwardFlops,
             .bytes = rows_of(s) * kBackwardBytes,
             .prepare = [s, &bench](CaseArrays& arrays) -> Launch {
               const std::int64_t heads = s.batch * s.length * s.value_heads, count = heads * s.key_width;
               const KdaInputs in = inputs(s, arrays);
               const auto out = [&](std::int64_t numbers) { return arrays.output(numbers, Dtype::kBf16); };
               const KdaBackward op{.shape = s,
                                    .in = in,
                                    .d_o = arrays.random(count, Dtype::kBf16),
                                    .d_q = out(count),
                                    .d_k = out(count),
                                    .d_v = out(count),
                                    .d_gate = out(count),
                                    .d_beta = out(heads),
                                    .d_a_log = arrays.floats(s.value_heads),
                                    .d_dt_bias = arrays.floats(s.value_heads * s.key_width)};
               return [op, &bench] { bench.ops().run(bench.stream(), op); };
             }});
}

}  // namespace

void add_kda_cases(KernelBench& bench) {
  const KdaShape full[] = {shape_of(1, 8192, 96), shape_of(4, 4096, 32), shape_of(1, 65536, 16)};
  const KdaShape tiny[] = {shape_of(1, 70, 2)};
  for (const KdaShape& s : full) {
    if (bench.tiny()) break;
    add_forward(bench, s);
    add_backward(bench, s);
  }
  for (const KdaShape& s : tiny) {
    if (!bench.tiny()) break;
    add_forward(bench, s);
    add_backward(bench, s);
  }
}

}  // namespace terrace::bench
