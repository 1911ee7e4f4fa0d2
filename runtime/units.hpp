// Sizes are a type, so that bytes are never added to counts or passed where a count is meant.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace terrace {

class Bytes {
 public:
  constexpr Bytes() = default;
  constexpr explicit Bytes(std::uint64_t count) : count_(count) {}
  [[nodiscard]] constexpr std::uint64_t count() const { return count_; }
  constexpr auto operator<=>(const Bytes&) const = default;
  constexpr Bytes& operator+=(Bytes other) {
    count_ += other.count_;
    return *this;
  }
  // Precondition: other <= *this. Sizes have no sign.
  constexpr Bytes& operator-=(Bytes other) {
    count_ -= other.count_;
    return *this;
  }

 private:
  std::uint64_t count_ = 0;
};

constexpr Bytes operator+(Bytes a, Bytes b) { return a += b; }
constexpr Bytes operator-(Bytes a, Bytes b) { return a -= b; }
constexpr Bytes operator*(Bytes a, std::uint64_t n) { return Bytes(a.count() * n); }
constexpr Bytes operator*(std::uint64_t n, Bytes a) { return a * n; }
constexpr std::uint64_t operator/(Bytes a, Bytes b) { return a.count() / b.count(); }
constexpr Bytes operator/(Bytes a, std::uint64_t n) { return Bytes(a.count() / n); }

constexpr Bytes round_up(Bytes size, Bytes granularity) {
  return Bytes((size.count() + granularity.count() - 1) / granularity.count() * granularity.count());
}
constexpr Bytes round_down(Bytes size, Bytes granularity) {
  return Bytes(size.count() / granularity.count() * granularity.count());
}
// a - b, or zero where b is larger.
constexpr Bytes saturating_sub(Bytes a, Bytes b) { return a > b ? a - b : Bytes(); }

inline namespace literals {
constexpr Bytes operator""_B(unsigned long long n) { return Bytes(n); }
constexpr Bytes operator""_KiB(unsigned long long n) { return Bytes(n << 10); }
constexpr Bytes operator""_MiB(unsigned long long n) { return Bytes(n << 20); }
constexpr Bytes operator""_GiB(unsigned long long n) { return Bytes(n << 30); }
}  // namespace literals

// "1.5 GiB", "64.0 MiB", "17 B": for people, never parsed back.
[[nodiscard]] std::string format_bytes(Bytes size);

// A place bytes can live. The numbers are part of the shared page's layout.
enum class TierId : std::uint8_t { kHbm = 0, kPeer = 1, kDdr = 2, kNvme = 3 };
inline constexpr int kTierCount = 4;
[[nodiscard]] const char* name_of(TierId tier);  // "hbm", "peer", "ddr", "nvme"

// Who a block serves. Blocks of different pools are kept apart, so that long-lived ones never sit between
// short-lived.
enum class Pool : std::uint8_t { kWeights = 0, kOptimizer, kGradient, kActivation, kExpert, kComm, kScratch };
inline constexpr int kPoolCount = 7;
[[nodiscard]] const char* name_of(Pool pool);  // "weights", "optimizer", ...

}  // namespace terrace
