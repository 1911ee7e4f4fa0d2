// What the scenes of stable addresses use: blocks whose words kernels mix, and what these words must be.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/hooks/guests/memory_scenes.hpp"

namespace terrace::guest {

inline constexpr std::size_t kBlock = 2 * kMiB, kWords = kBlock / 8;

inline Pointer number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// Touched here and there: every page, and both ends.
inline constexpr std::size_t kStride = 251;
inline std::uint64_t word_at(std::uint64_t seed, std::size_t index) {
  return (seed + 1) * 0x9E3779B97F4A7C15ULL + index * 0xBF58476D1CE4E5B9ULL;
}
template <typename Visit>
void each_index(const Visit& visit) {
  for (std::size_t i = 0; i < kWords; i += kStride) visit(i);
  visit(kWords - 1);
}

// out[i] = out[i] * 3 + in[i]
inline void mix(void** parameters) {
  auto* const out = *static_cast<std::uint64_t**>(parameters[0]);
  const auto* const in = *static_cast<std::uint64_t**>(parameters[1]);
  each_index([&](std::size_t i) { out[i] = out[i] * 3 + in[i]; });
}

inline void* kernel(const char* name, void (*run)(void**), std::vector<std::size_t> sizes, int told = 1) {
  return loopback_kernel(name, run, sizes.data(), sizes.size(), told);
}
inline int launch(void* function, void* stream, std::vector<Pointer> values) {
  std::vector<void*> parameters;
  for (Pointer& value : values) parameters.push_back(&value);
  return cudaLaunchKernel(function, {1, 1, 1}, {1, 1, 1}, parameters.data(), 0, stream);
}

// Blocks with the words that a program without any budget would have in them.
struct Blocks {
  std::vector<Pointer> at;
  std::vector<std::vector<std::uint64_t>> expected;  // by block, the words that are looked at
  int allocated = 0;

  bool add(int how_many) {
    std::vector<std::uint64_t> host(kWords);
    for (int n = 0; n < how_many; ++n) {
      void* made = nullptr;
      if (cudaMalloc(&made, kBlock) != 0) return false;
      for (std::size_t i = 0; i < kWords; ++i) host[i] = word_at(at.size(), i);
      if (cuMemcpyHtoD_v2(number(made), host.data(), kBlock) != 0) return false;
      at.push_back(number(made));
      expected.emplace_back();
      each_index([&](std::size_t i) { expected.back().push_back(host[i]); });
    }
    return true;
  }
  void mixed(std::size_t out, std::size_t in) {
    for (std::size_t i = 0; i < expected[out].size(); ++i)
      expected[out][i] = expected[out][i] * 3 + expected[in][i];
  }
  // Blocks with a wrong word.
  int wrong() {
    int wrong = 0;
    std::vector<std::uint64_t> host(kWords);
    for (std::size_t n = 0; n < at.size(); ++n) {
      if (at[n] == 0) continue;
      if (cuMemcpyDtoH_v2(host.data(), at[n], kBlock) != 0) {
        ++wrong;
        continue;
      }
      std::vector<std::uint64_t> seen;
      each_index([&](std::size_t i) { seen.push_back(host[i]); });
      wrong += seen == expected[n] ? 0 : 1;
    }
    return wrong;
  }
  int in_hbm() {
    int count = 0;
    for (const Pointer each : at) count += each != 0 && loopback_in_hbm(each) != 0 ? 1 : 0;
    return count;
  }
  void free_all() {
    for (Pointer& each : at) cuMemFree_v2(each);
    at.clear();
  }
};

// With a budget of 96 MiB, 64 of which the context takes: 16 blocks fit.
inline constexpr int kTwice = 32;

}  // namespace terrace::guest
