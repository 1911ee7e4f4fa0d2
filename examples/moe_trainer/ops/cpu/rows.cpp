// Rows to experts and back. These take bf16 as it is: how many rows x has is not known here, so it could not
// be converted beforehand.
#include <algorithm>
#include <stdexcept>

#include "examples/moe_trainer/ops/cpu/kernels.hpp"
#include "examples/moe_trainer/ops/cpu/parallel.hpp"

namespace terrace::trainer::cpu {
namespace {

constexpr std::int64_t kRowGrain = 64;

float value_of(float x) { return x; }
float value_of(Bf16 x) { return to_float(x); }
void put(float* to, float value) { *to = value; }
void put(Bf16* to, float value) { *to = to_bf16(value); }

template <typename Body>
void with_element(Dtype dtype, Body&& body) {
  if (dtype == Dtype::kF32) return body(float{});
  body(Bf16{});
}
void check_types(bool alike) {
  if (!alike) throw std::runtime_error("rows of experts: all arrays must have one type");
}

template <typename T>
void gather(const GatherRows& op) {
  parallel_ranges(op.rows, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      T* out = op.out.as<T>() + r * op.width;
      if (op.source[r] < 0) {
        std::fill_n(out, op.width, T{});
      } else {
        std::copy_n(op.x.as<T>() + op.source[r] / op.top_k * op.width, op.width, out);
      }
    }
  });
}

template <typename T>
void sum(const SumRows& op) {
  constexpr std::int64_t kColumns = 256;  // summed at a time, in fp32
  parallel_ranges(op.tokens, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    float total[kColumns];
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t at = 0; at < op.width; at += kColumns) {
        const std::int64_t n = std::min(kColumns, op.width - at);
        T* out = op.out.as<T>() + t * op.width + at;
        std::fill_n(total, n, 0.0F);
        if (op.into == Accumulate::kAdd) std::transform(out, out + n, total, [](T x) { return value_of(x); });
        for (std::int64_t j = t * op.top_k; j < (t + 1) * op.top_k; ++j) {
          if (op.row[j] < 0) continue;
          const float weight = op.weight == nullptr ? 1.0F : op.weight[j];
          const T* x = op.x.as<T>() + op.row[j] * op.width + at;
          for (std::int64_t i = 0; i < n; ++i) total[i] += weight * value_of(x[i]);
        }
        for (std::int64_t i = 0; i < n; ++i) put(out + i, total[i]);
      }
    }
  });
}

// Sixteen running sums, so that the compiler may take them together.
template <typename T>
float inner_product(const T* a, const T* b, std::int64_t count) {
  constexpr std::int64_t kSums = 16;
  float sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::int64_t j = 0; j < kSums; ++j) sums[j] += value_of(a[i + j]) * value_of(b[i + j]);
  }
  for (; i < count; ++i) sums[i % kSums] += value_of(a[i]) * value_of(b[i]);
  float total = 0;
  for (const float each : sums) total += each;
  return total;
}

template <typename T>
void sum_backward(const SumRowsBackward& op) {
  parallel_ranges(op.tokens, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin * op.top_k; j < end * op.top_k; ++j) {
      const T* d_out = op.d_out.as<T>() + j / op.top_k * op.width;
      const bool dropped = op.row[j] < 0;
      if (op.d_weight != nullptr) {
        op.d_weight[j] = dropped ? 0.0F : inner_product(d_out, op.x.as<T>() + op.row[j] * op.width, op.width);
      }
      if (dropped || !op.d_x) continue;
      const float weight = op.weight == nullptr ? 1.0F : op.weight[j];
      T* d_x = op.d_x.as<T>() + op.row[j] * op.width;
      for (std::int64_t i = 0; i < op.width; ++i) put(d_x + i, weight * value_of(d_out[i]));
    }
  });
}

}  // namespace

// Called when the operator is enqueued, so a wrong type is reported to the caller.
Bytes scratch_bytes(const GatherRows& op) { return check_types(op.x.dtype() == op.out.dtype()), Bytes(); }
Bytes scratch_bytes(const SumRows& op) { return check_types(op.x.dtype() == op.out.dtype()), Bytes(); }
Bytes scratch_bytes(const SumRowsBackward& op) {
  const Dtype dtype = op.d_out.dtype();
  return check_types((!op.x || op.x.dtype() == dtype) && (!op.d_x || op.d_x.dtype() == dtype)), Bytes();
}

void compute(const GatherRows& op, std::byte*) {
  with_element(op.x.dtype(), [&](auto element) { gather<decltype(element)>(op); });
}
void compute(const SumRows& op, std::byte*) {
  with_element(op.x.dtype(), [&](auto element) { sum<decltype(element)>(op); });
}
void compute(const SumRowsBackward& op, std::byte*) {
  with_element(op.d_out.dtype(), [&](auto element) { sum_backward<decltype(element)>(op); });
}

}  // namespace terrace::trainer::cpu
