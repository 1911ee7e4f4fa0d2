#include "tests/trainer/oracle_fp8.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace terrace::trainer::oracle {

double e4m3_value(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1 + mantissa / 8.0, exponent - 7);
  return (code & 0x80) != 0 ? -size : size;
}

std::uint8_t e4m3_code(double value) {
  if (std::isnan(value)) return 0x7F;
  static const Values sizes = [] {
    Values all;
    for (int code = 0; code < 0x7F; ++code) all.push_back(e4m3_value(static_cast<std::uint8_t>(code)));
    return all;
  }();
  const double size = std::min(std::abs(value), sizes.back());
  const auto above = std::lower_bound(sizes.begin(), sizes.end(), size);
  auto code = static_cast<int>(above - sizes.begin());
  if (code > 0) {
    const double up = *above - size, down = size - above[-1];
    if (down < up || (down == up && code % 2 != 0)) --code;
  }
  return static_cast<std::uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

Values Quantised::values() const {
  Values all;
  const std::size_t width = scale.empty() ? 1 : codes.size() / scale.size();
  for (std::size_t i = 0; i < codes.size(); ++i) all.push_back(e4m3_value(codes[i]) * scale[i / width]);
  return all;
}

Quantised quantise(const Values& x, std::int64_t width) {
  Quantised out;
  for (auto row = x.begin(); row != x.end(); row += width) {
    float amax = 0;
    bool finite = true;
    for (auto each = row; each != row + width; ++each) {
      finite = finite && std::isfinite(*each);
      amax = std::max(amax, static_cast<float>(std::abs(*each)));
    }
    if (amax == 0) amax = 448;
    amax = finite ? std::max(amax, 0x1p-100F) : std::numeric_limits<float>::quiet_NaN();
    const float factor = 448.0F / amax;
    out.scale.push_back(amax / 448.0F);
    std::transform(row, row + width, std::back_inserter(out.codes), [factor](double each) {
      return e4m3_code(static_cast<float>(each * static_cast<double>(factor)));
    });
  }
  return out;
}

Values turned(const Values& w, std::int64_t groups, std::int64_t n) {
  const auto count = static_cast<std::int64_t>(w.size());
  const std::int64_t k = count / std::max<std::int64_t>(groups * n, 1);
  Values out(w.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t group = i / (n * k), row = i / k % n, column = i % k;
    out[static_cast<std::size_t>((group * k + column) * n + row)] = w[static_cast<std::size_t>(i)];
  }
  return out;
}

}  // namespace terrace::trainer::oracle
