// Where in device memory addresses of blocks have been written from the host: a launch that is given such a
// place may reach whatever its tables name.
//
// Known by pages of 64 KiB, which stay marked: memory that was a table once holds everything up for a while
// longer than it must, and never too short. Bounded: where it is full every place counts. Reading takes no
// lock, and one load while nothing is marked.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "hooks/intercept/cuda/abi.hpp"

namespace terrace::hooks::cuda {

class PointerPages {
 public:
  static constexpr std::size_t kMostScanned = 256 * 1024;  // bytes of a copy; larger ones are data

  constexpr PointerPages() = default;
  [[nodiscard]] bool any() const noexcept { return count_.load(std::memory_order_acquire) != 0; }
  [[nodiscard]] bool marked(std::uint64_t word) const noexcept {
    if (!any()) [[likely]]
      return false;
    if (full_.load(std::memory_order_relaxed)) return true;
    const std::uint64_t page = word >> kShift;
    if (page == 0) return false;
    for (std::size_t at = home_of(page), probes = 0; probes < kProbes; ++probes, at = (at + 1) % kSlots) {
      const std::uint64_t there = slots_[at].load(std::memory_order_relaxed);
      if (there == page) return true;
      if (there == 0) return false;
    }
    return false;
  }
  void mark(DevicePointer at, std::size_t bytes) noexcept {
    for (std::uint64_t page = at >> kShift; page <= (at + bytes - 1) >> kShift; ++page) mark_page(page);
  }

 private:
  static constexpr std::size_t kSlots = 4096, kProbes = 32;
  static constexpr int kShift = 16;
  static std::size_t home_of(std::uint64_t page) noexcept {
    return (page * 0x9E3779B97F4A7C15ULL >> 32) % kSlots;
  }
  void mark_page(std::uint64_t page) noexcept {
    for (std::size_t at = home_of(page), probes = 0; probes < kProbes; ++probes, at = (at + 1) % kSlots) {
      std::uint64_t there = 0;
      if (!slots_[at].compare_exchange_strong(there, page, std::memory_order_relaxed) && there != page)
        continue;
      count_.fetch_add(1, std::memory_order_release);
      return;
    }
    full_.store(true, std::memory_order_relaxed);
    count_.fetch_add(1, std::memory_order_release);
  }

  std::array<std::atomic<std::uint64_t>, kSlots> slots_{};
  std::atomic<std::uint64_t> count_{0};
  std::atomic<bool> full_{false};
};

// The one of this process; never destroyed.
[[nodiscard]] PointerPages& pointer_pages() noexcept;

// A copy to `to` is about to be made from memory of the host, or from device memory.
void see_copy_from_host(DevicePointer to, const void* from, std::size_t bytes) noexcept;
void see_copy_on_device(DevicePointer to, DevicePointer from, std::size_t bytes) noexcept;
// From either: who calls does not say.
void see_copy(DevicePointer to, DevicePointer from, std::size_t bytes) noexcept;

}  // namespace terrace::hooks::cuda
