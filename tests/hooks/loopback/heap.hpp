// Host memory behind the loopback driver: what is live, and limits that make calls fail as a device would.
#pragma once

#include <cstdlib>
#include <map>
#include <mutex>

namespace terrace::loopback {

inline constexpr std::size_t kCapacity = std::size_t{1} << 30;  // a larger request is out of memory

class Heap {
 public:
  void* allocate(std::size_t bytes) {
    if (bytes == 0 || bytes > kCapacity) return nullptr;
    const std::lock_guard lock(mutex_);
    void* address = std::malloc(16);  // nobody looks inside
    live_[address] = bytes;
    return address;
  }
  bool free(void* address) {
    const std::lock_guard lock(mutex_);
    if (live_.erase(address) == 0) return false;
    std::free(address);
    return true;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::size_t> live_;
};

inline Heap& heap() {
  static Heap& instance = *new Heap;  // outlives every destructor that frees
  return instance;
}

}  // namespace terrace::loopback
