// A Block of runtime/ring_block.hpp that is one thread of the host: for the emulated device, and for tests
// that run the blocks of an exchange beside each other as a GPU does.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "runtime/ring_block.hpp"

namespace terrace::emulated {

class HostBlock {
 public:
  [[nodiscard]] static std::uint32_t thread() { return 0; }
  [[nodiscard]] static std::uint32_t threads() { return 1; }
  static void sync() {}
  [[nodiscard]] static bool agree(bool mine) { return mine; }

  [[nodiscard]] static std::uint64_t load(const std::uint64_t* word) {
    return of(const_cast<std::uint64_t*>(word)).load(std::memory_order_acquire);
  }
  static void store(std::uint64_t* word, std::uint64_t value) {
    of(word).store(value, std::memory_order_release);
  }
  static std::uint64_t add(std::uint64_t* word) { return of(word).fetch_add(1, std::memory_order_acq_rel); }
  [[nodiscard]] static bool claim(std::uint64_t* word) {
    std::uint64_t expected = 0;
    return of(word).compare_exchange_strong(expected, 1, std::memory_order_acq_rel);
  }

  static void copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
    std::memcpy(to, from, bytes);
  }
  [[nodiscard]] static std::uint64_t now_ns() {
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  // The other rank's thread may need this core: give it up at once, and sleep if that does not help.
  void pause() {
    constexpr int kYields = 64;
    if (++pauses_ % kYields != 0) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

 private:
  static std::atomic_ref<std::uint64_t> of(std::uint64_t* word) { return std::atomic_ref(*word); }
  int pauses_ = 0;
};

}  // namespace terrace::emulated
