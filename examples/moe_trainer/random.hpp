// Numbers from a seed, a stream and a counter: any of them can be asked for at any time, in any order, and is
// always the same. Nothing to save in a checkpoint but the counter. Devices agree on bits and uniform
// numbers; their logarithms and cosines may differ in the last bit of fp64, so one normal number in some
// hundred million in that of fp32.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

#include "examples/moe_trainer/ops/array.hpp"

namespace terrace::trainer {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
[[nodiscard]] TERRACE_HOST_DEVICE constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// FNV-1a, 64 bits.
[[nodiscard]] constexpr std::uint64_t hash_text(std::string_view text,
                                                std::uint64_t start = 0xcbf29ce484222325ULL) {
  std::uint64_t hash = start;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

class CounterRandom {
 public:
  struct Key {
    std::uint64_t seed = 0;
    std::string_view stream;  // what the numbers are for: a parameter's name, "data"
  };
  explicit constexpr CounterRandom(Key key) : key_(mix_bits(mix_bits(key.seed) ^ hash_text(key.stream))) {}

  [[nodiscard]] TERRACE_HOST_DEVICE constexpr std::uint64_t bits(std::uint64_t counter) const {
    return mix_bits(key_ ^ mix_bits(counter));
  }
  // In (0, 1).
  [[nodiscard]] TERRACE_HOST_DEVICE constexpr double uniform(std::uint64_t counter) const {
    return (static_cast<double>(bits(counter) >> 11) + 0.5) * 0x1.0p-53;
  }
  // Standard normal (Box and Muller), from the uniform numbers 2 c and 2 c + 1.
  [[nodiscard]] TERRACE_HOST_DEVICE double normal(std::uint64_t counter) const {
    const double radius = std::sqrt(-2.0 * std::log(uniform(2 * counter)));
    return radius * std::cos(2.0 * std::numbers::pi * uniform(2 * counter + 1));
  }

 private:
  std::uint64_t key_;
};

}  // namespace terrace::trainer
