// The trainer's operators, timed one by one and set beside what the machine could do: `./dev bench kernels`.
//
// A family is one source, bench/kernels_FAMILY.cpp, with one function below and one line in the table of
// kernels.cpp. It adds cases; the bench prepares, times and prints them:
//
//   void add_rows_cases(KernelBench& bench) {
//     const std::int64_t rows = bench.tiny() ? 64 : 8192, width = bench.tiny() ? 48 : 7168;
//     bench.add({.name = "rms_norm/" + std::to_string(rows) + "x" + std::to_string(width),
//                .bytes = 2.0 * 2 * rows * width,
//                .prepare = [=, &bench](CaseArrays& arrays) -> Launch {
//                  const trainer::RmsNorm op{rows, width, 1e-5F, arrays.random(rows * width, Dtype::kBf16),
//                                            arrays.floats(width), arrays.output(rows * width,
//                                            Dtype::kBf16)};
//                  return [op, &bench] { bench.ops().run(bench.stream(), op); };
//                }});
//   }
//
// Names are "what/shape", the same as the peer's in bench/peers; a row's case is "FAMILY/NAME":
//   kda/forward/1x8192x96x128                  batch x length x heads x width; backward/ alike
//   grouped/forward/64x256x2048x2048           groups x rows of each x n x k; input_gradient/,
//   weight_gradient/;
//                                              with "/skewed" behind for skewed_offsets(groups, groups *
//                                              rows)
//   grouped/forward/896x1..64x2048x2048        small_offsets(groups)
//   dsa/forward/latent/1x8192x64x2048          batch x length x heads x top-k, MLA form (576, 512); backward/
//
// On cuda the floor of a case is max(flops / the rate of a bf16 8192-cubed product of cuBLAS, bytes / the
// rate of a copy in device memory, read and write), both measured in the same run. On the emulated device
// cases are tiny, show that they run, and have no floor.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "examples/moe_trainer/ops/ops.hpp"

namespace terrace::bench {

using trainer::Dtype;
using trainer::In;
using trainer::Out;

// Random numbers around `mean`, with the given standard deviation; none is zero by design.
struct Spread {
  double deviation = 1;
  double mean = 0;
};

// Device memory of one set of a case's arrays. They live as long as the set. Throws std::runtime_error where
// memory is short.
class CaseArrays {
 public:
  virtual ~CaseArrays() = default;
  // Uninitialised on cuda; may be written by the case, and given to operators as In where a value of any kind
  // will do.
  [[nodiscard]] virtual Out output(std::int64_t count, Dtype dtype) = 0;
  [[nodiscard]] virtual Out random(std::int64_t count, Dtype dtype, Spread spread) = 0;
  [[nodiscard]] virtual std::int32_t* ints(const std::vector<std::int32_t>& values) = 0;

  [[nodiscard]] Out random(std::int64_t count, Dtype dtype) { return random(count, dtype, Spread{}); }
  [[nodiscard]] float* floats(std::int64_t count, Spread spread = {}) {
    return random(count, Dtype::kF32, spread).f32();
  }
  [[nodiscard]] float* float_output(std::int64_t count) { return output(count, Dtype::kF32).f32(); }
  [[nodiscard]] std::int32_t* int_output(std::int64_t count) {
    return output(count, Dtype::kF32).as<std::int32_t>();
  }
};

// Enqueues the case once on the bench's stream. What it needs from earlier operators (a selection, a
// permutation) is computed in `prepare`, which is not timed.
using Launch = std::function<void()>;

struct KernelCase {
  std::string name;
  double flops = 0;  // that the result needs, in products of bf16 matrices: the matrix units' floor
  double bytes = 0;  // mandatory traffic: every input read once, every output written once
  // Called once a set: where a set is smaller than a few times the L2 cache, several sets take turns.
  std::function<Launch(CaseArrays&)> prepare;
};

class KernelBench {
 public:
  virtual ~KernelBench() = default;
  [[nodiscard]] virtual trainer::Ops& ops() = 0;
  [[nodiscard]] virtual Stream stream() const = 0;
  // The emulated device: a case takes milliseconds and megabytes at most.
  [[nodiscard]] virtual bool tiny() const = 0;
  virtual void add(KernelCase each) = 0;

  // A second stream, with operators whose scratch is apart. A case that uses it forks first: what is launched
  // there then comes after all that was launched on stream(); and joins last, the other way round.
  struct Beside {
    trainer::Ops& ops;
    Stream stream;
  };
  [[nodiscard]] virtual Beside beside() = 0;
  virtual void fork() = 0;
  virtual void join() = 0;
};

// Row counts of experts, the same numbers as in bench/peers/kernels.py, as ends of ranges: (groups + 1),
// first 0. Skewed: expert g gets rows as 1 / (1 + g), rounded down, the first what is left: its share is a
// fifth to a third.
[[nodiscard]] inline std::vector<std::int32_t> skewed_offsets(std::int64_t groups, std::int64_t rows) {
  double whole = 0;
  for (std::int64_t g = 0; g < groups; ++g) whole += 1.0 / static_cast<double>(1 + g);
  std::vector<std::int64_t> counts;
  std::int64_t left = rows;
  for (std::int64_t g = 0; g < groups; ++g) {
    const double share = static_cast<double>(rows) / static_cast<double>(1 + g) / whole;
    counts.push_back(static_cast<std::int64_t>(share));
    left -= counts.back();
  }
  counts[0] += left;
  std::vector<std::int32_t> offsets{0};
  for (const std::int64_t count : counts)
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(count));
  return offsets;
}
// Small: 1 to 64 rows each.
[[nodiscard]] inline std::vector<std::int32_t> small_offsets(std::int64_t groups) {
  std::vector<std::int32_t> offsets{0};
  for (std::int64_t g = 0; g < groups; ++g) {
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(1 + g * 37 % 64));
  }
  return offsets;
}

// The families.
void add_attention_cases(KernelBench& bench);
void add_dsa_cases(KernelBench& bench);
void add_fp8_cases(KernelBench& bench);
void add_grouped_cases(KernelBench& bench);
void add_kda_cases(KernelBench& bench);
void add_loss_cases(KernelBench& bench);
void add_routing_cases(KernelBench& bench);
void add_rows_cases(KernelBench& bench);

}  // namespace terrace::bench
