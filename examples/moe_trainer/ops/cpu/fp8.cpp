// 8-bit numbers made and multiplied. A product is that of the numbers' fp32 values, scales included.
#include "examples/moe_trainer/ops/fp8.hpp"

#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRowGrain = 16;

// `count` numbers of bf16, `step` apart.
struct Line {
  const Bf16* at;
  std::int64_t count, step;
};

// Returns the scale.
float quantise(const Line& from, E4m3* to) {
  std::uint32_t amax = 0;
  for (std::int64_t i = 0; i < from.count; ++i) amax = std::max(amax, from.at[i * from.step].bits & 0x7FFFU);
  const E4m3Scale by = e4m3_scale(amax);
  for (std::int64_t i = 0; i < from.count; ++i) to[i] = to_e4m3(to_float(from.at[i * from.step]) * by.factor);
  return by.scale;
}

const Bf16* bf16_of(In x) {
  if (x.dtype() != Dtype::kBf16) throw std::runtime_error("8-bit numbers are made of bf16, not of fp32");
  return x.as<Bf16>();
}

// Rows of 8-bit numbers as fp32.
struct Quantised {
  const E4m3* q;
  const float* scale;
  std::int64_t width;
};
void widen_rows(const Quantised& from, std::int64_t first, std::int64_t last, float* to) {
  parallel_ranges(last - first, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = (first + begin) * from.width; i < (first + end) * from.width; ++i) {
      to[i] = to_float(from.q[i]) * from.scale[i / from.width];
    }
  });
}

struct Widened {
  float *a, *w;
};
Widened widened(const GroupedMatmulFp8& op, ScratchCursor& cursor) {
  float* a = cursor.take<float>(op.rows * op.k);
  return {a, cursor.take<float>(op.groups * op.n * op.k)};
}

}  // namespace

void compute(const QuantiseRows& op, std::byte*) {
  const Bf16* x = bf16_of(op.x);
  parallel_ranges(op.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      op.scale[r] = quantise({x + r * op.width, op.width, 1}, op.q + r * op.width);
    }
  });
}

void compute(const QuantiseWeights& op, std::byte*) {
  const Bf16* w = bf16_of(op.w);
  if (op.q != nullptr) {
    compute(QuantiseRows{.rows = op.groups * op.n, .width = op.k, .x = op.w, .q = op.q, .scale = op.scale},
            nullptr);
  }
  if (op.q_turned == nullptr) return;
  parallel_ranges(op.groups * op.k, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Line column{w + i / op.k * op.n * op.k + i % op.k, op.n, op.k};
      op.turned_scale[i] = quantise(column, op.q_turned + i * op.n);
    }
  });
}

Bytes scratch_bytes(const GroupedMatmulFp8& op) {
  ScratchCursor cursor(nullptr);
  (void)widened(op, cursor);
  return cursor.used();
}

void compute(const GroupedMatmulFp8& op, std::byte* scratch) {
  ScratchCursor cursor(scratch);
  const Widened to = widened(op, cursor);
  widen_rows({op.a, op.a_scale, op.k}, op.offsets[0], op.offsets[op.groups], to.a);
  widen_rows({op.w, op.w_scale, op.k}, 0, op.groups * op.n, to.w);
  compute(GroupedMatmul{.groups = op.groups,
                        .rows = op.rows,
                        .n = op.n,
                        .k = op.k,
                        .offsets = op.offsets,
                        .a = to.a,
                        .w = to.w,
                        .c = op.c,
                        .into = op.into},
          GroupedPass::kForward);
}

}  // namespace terrace::trainer::cpu
