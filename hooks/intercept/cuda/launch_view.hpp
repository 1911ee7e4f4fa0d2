// What a kernel launch can reach: its parameters, read word by word for addresses of live blocks.
//
// The layout of a function's parameters is asked of the driver once and kept. A word that lies in a block of
// a pool in this process names that block; what lies behind pointers in device memory is not seen. Reading
// takes no lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "hooks/intercept/cuda/abi.hpp"

namespace terrace::hooks::cuda {

struct Parameter {
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
};

class ParameterLayouts {
 public:
  static constexpr std::size_t kSlots = 8192;  // functions; a power of two
  static constexpr std::size_t kMostParameters = 256;
  struct Layout {
    FunctionHandle function = nullptr;
    std::uint64_t generation = 0;
    std::uint32_t count = 0;
    bool wide = false;  // a parameter is large enough for a tensor map
    // The driver does not tell, or its name says that they are not all it reaches.
    bool opaque = false;
    const char* name = "";  // where the driver tells
    const char* why = "";   // it is opaque
    Parameter parameters[1];
    [[nodiscard]] std::span<const Parameter> all() const { return {parameters, count}; }
  };

  constexpr ParameterLayouts() = default;
  // Null where no place is left for another function. Layouts live as long as the process.
  [[nodiscard]] const Layout* of(FunctionHandle function) noexcept {
    const std::uint64_t generation = generation_.load(std::memory_order_relaxed);
    std::size_t at = home_of(function);
    for (std::size_t probes = 0; probes < kMostProbes; ++probes, at = (at + 1) & (kSlots - 1)) {
      const Layout* known = slots_[at].load(std::memory_order_acquire);
      if (known == nullptr) break;
      if (known->function == function && known->generation == generation) return known;
    }
    return learn(function);
  }
  // Functions were unloaded: their handles may name others.
  void forget() noexcept { generation_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kMostProbes = 32;
  [[nodiscard]] static std::size_t home_of(FunctionHandle function) noexcept {
    const auto key = reinterpret_cast<std::uintptr_t>(function);
    return (key * 0x9E3779B97F4A7C15ULL) >> (64 - 13);
  }
  static_assert(kSlots == std::size_t{1} << 13);
  [[nodiscard]] const Layout* learn(FunctionHandle function) noexcept;
  [[nodiscard]] static Layout* ask(FunctionHandle function) noexcept;  // the driver; null: no memory

  std::array<std::atomic<const Layout*>, kSlots> slots_{};
  std::atomic<std::uint64_t> generation_{1};
};

// The one of this process; never destroyed.
[[nodiscard]] ParameterLayouts& launch_layouts() noexcept;

// The first launch that holds everything is said once, with why: its layout's own reason where `why` is
// empty. Its name and the reason, for reports; empty: there was none.
void note_opaque(FunctionHandle function, const char* why) noexcept;
[[nodiscard]] std::string_view first_opaque() noexcept;

// A driver has made a tensor map of a block's address in which that address is not to be seen: launches that
// could have been given one reach more than their words say.
class TensorMaps {
 public:
  static constexpr std::size_t kBytes = 128;  // CUtensorMap
  constexpr TensorMaps() = default;
  void made(const void* map, const void* address) noexcept;
  [[nodiscard]] bool hide_addresses() const noexcept { return hidden_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> hidden_{false};
};
[[nodiscard]] TensorMaps& tensor_maps() noexcept;

// The parameters of one launch, in one of the two ways to give them.
struct Launch {
  FunctionHandle function = nullptr;
  void** parameters = nullptr;
  void** extra = nullptr;  // pairs of a key and a value, ended by null
};

// Calls visit(word) for every aligned word of `bytes` bytes at `from`.
template <typename Visit>
void each_word(const void* from, std::size_t bytes, const Visit& visit) {
  const auto* at = static_cast<const std::byte*>(from);
  for (; bytes >= sizeof(std::uint64_t); bytes -= sizeof(std::uint64_t), at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    visit(word);
  }
}

enum class Readable : std::uint8_t { kYes, kNo };

// Calls visit(word) for every word of a launch's parameters that could be an address.
template <typename Visit>
[[nodiscard]] Readable each_parameter_word(const Launch& launch, ParameterLayouts& layouts,
                                           const Visit& visit) {
  if (launch.extra != nullptr) {
    const void* buffer = nullptr;
    std::size_t bytes = 0;
    for (void** pair = launch.extra; *pair != nullptr; pair += 2) {
      if (*pair == reinterpret_cast<void*>(1)) buffer = pair[1];
      if (*pair == reinterpret_cast<void*>(2)) bytes = *static_cast<const std::size_t*>(pair[1]);
    }
    if (buffer != nullptr) {
      each_word(buffer, bytes, visit);
      return Readable::kYes;
    }
  }
  const ParameterLayouts::Layout* layout = layouts.of(launch.function);
  if (layout == nullptr || layout->opaque) return Readable::kNo;
  if (launch.parameters == nullptr) return layout->count == 0 ? Readable::kYes : Readable::kNo;
  for (std::size_t i = 0; i < layout->count; ++i)
    each_word(launch.parameters[i], layout->parameters[i].bytes, visit);
  return Readable::kYes;
}

// Whether it could have been given a tensor map.
[[nodiscard]] inline bool may_hold_tensor_map(const Launch& launch, ParameterLayouts& layouts) noexcept {
  if (launch.extra != nullptr) return true;
  const ParameterLayouts::Layout* layout = layouts.of(launch.function);
  return layout == nullptr || layout->wide;
}

// Reads a launch that is about to go to the driver, where a pool is in use, and counts what it can tell.
void see_launch(const Launch& launch) noexcept;

}  // namespace terrace::hooks::cuda
