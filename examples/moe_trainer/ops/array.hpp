// One array of an operator: where it lies in device memory, and what its numbers are.
//
// An operator's activations and the weights it multiplies are `In` and `Out`: fp32 or bf16, one type for all
// of them in a call unless the operator says otherwise. Everything else an operator takes (norm weights,
// gates' parameters, router logits, log-sum-exps, states, gradients of parameters) is fp32, a plain `float*`.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#ifdef __CUDACC__
#define TERRACE_HOST_DEVICE __host__ __device__
#else
#define TERRACE_HOST_DEVICE
#endif

namespace terrace::trainer {

enum class Dtype : std::uint8_t { kF32, kBf16 };
[[nodiscard]] TERRACE_HOST_DEVICE constexpr std::int64_t bytes_of(Dtype dtype) {
  return dtype == Dtype::kF32 ? 4 : 2;
}
[[nodiscard]] constexpr const char* name_of(Dtype dtype) { return dtype == Dtype::kF32 ? "fp32" : "bf16"; }

// The upper half of an fp32 number.
struct Bf16 {
  std::uint16_t bits;
};
[[nodiscard]] inline float to_float(Bf16 number) {
  const std::uint32_t bits = static_cast<std::uint32_t>(number.bits) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// To nearest, ties to even; NaN stays NaN.
[[nodiscard]] inline Bf16 to_bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16)};
}

template <typename Pointer>  // const void* or void*
class ArrayOf {
  static constexpr bool kRead = std::is_same_v<Pointer, const void*>;
  template <typename T>
  using To = std::conditional_t<kRead, const T*, T*>;

 public:
  TERRACE_HOST_DEVICE constexpr ArrayOf() = default;
  TERRACE_HOST_DEVICE constexpr ArrayOf(std::nullptr_t) {}
  TERRACE_HOST_DEVICE constexpr ArrayOf(To<float> at) : at_(at) {}
  TERRACE_HOST_DEVICE constexpr ArrayOf(To<Bf16> at) : at_(at), dtype_(Dtype::kBf16) {}
  TERRACE_HOST_DEVICE constexpr ArrayOf(Pointer at, Dtype dtype) : at_(at), dtype_(dtype) {}
  // What is written may be read.
  template <std::same_as<void*> Other>
  TERRACE_HOST_DEVICE constexpr ArrayOf(const ArrayOf<Other>& written)
      : at_(written.at()), dtype_(written.dtype()) {}

  [[nodiscard]] TERRACE_HOST_DEVICE constexpr explicit operator bool() const { return at_ != nullptr; }
  [[nodiscard]] TERRACE_HOST_DEVICE constexpr Pointer at() const { return at_; }
  [[nodiscard]] TERRACE_HOST_DEVICE constexpr Dtype dtype() const { return dtype_; }
  // Unchecked: for code that has looked at dtype().
  template <typename T>
  [[nodiscard]] TERRACE_HOST_DEVICE To<T> as() const {
    return static_cast<To<T>>(at_);
  }
  // For operators that take fp32 alone. Throws std::invalid_argument on anything else; kernels do not look.
  [[nodiscard]] TERRACE_HOST_DEVICE To<float> f32() const {
#ifndef __CUDA_ARCH__
    if (dtype_ != Dtype::kF32) throw std::invalid_argument("this operator takes fp32 arrays, not bf16");
#endif
    return static_cast<To<float>>(at_);
  }
  TERRACE_HOST_DEVICE operator To<float>() const { return f32(); }

 private:
  Pointer at_ = nullptr;
  Dtype dtype_ = Dtype::kF32;
};
using In = ArrayOf<const void*>;
using Out = ArrayOf<void*>;

// Sequences of different lengths, one behind the other in one row of tokens (batch 1): sequence i is tokens
// starts[i] .. starts[i + 1). None reads another's tokens. No starts: every batch row is a sequence.
struct Packing {
  std::int64_t sequences = 0;
  const std::int32_t* starts = nullptr;  // (sequences + 1), device memory; first 0, last = length, ascending
  [[nodiscard]] TERRACE_HOST_DEVICE constexpr explicit operator bool() const { return starts != nullptr; }
};

}  // namespace terrace::trainer
