// 8-bit numbers and their products again, in float64 and from the format's definition.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/trainer/oracle.hpp"

namespace terrace::trainer::oracle {

// The value of each of the 256 codes.
[[nodiscard]] double e4m3_value(std::uint8_t code);
// The nearest code, of two the even one, of larger values that of 448; NaN: 0x7F.
[[nodiscard]] std::uint8_t e4m3_code(double value);

struct Quantised {
  std::vector<std::uint8_t> codes;
  Values scale;                         // of each row, exactly an fp32 number
  [[nodiscard]] Values values() const;  // scales included
};
// Rows of `width` numbers, each exactly bf16.
[[nodiscard]] Quantised quantise(const Values& x, std::int64_t width);
// (groups, k, n) of (groups, n, k).
[[nodiscard]] Values turned(const Values& w, std::int64_t groups, std::int64_t n);

}  // namespace terrace::trainer::oracle
