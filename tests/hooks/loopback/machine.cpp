#include "tests/hooks/loopback/machine.hpp"

#include <cstdlib>
#include <utility>

namespace terrace::loopback {

thread_local int current_device = -1;
thread_local int capture_mode = 0;

Machine& machine() {
  static Machine& the = *[] {
    auto* made = new Machine;  // outlives every destructor that frees
    if (const char* at = std::getenv("LOOPBACK_FAIL_AT")) made->fail_at = std::atol(at);
    if (const char* count = std::getenv("LOOPBACK_FAILS")) made->fails = std::atol(count);
    if (const char* with = std::getenv("LOOPBACK_FAIL_WITH")) made->fail_with = std::atoi(with);
    if (const char* others = std::getenv("LOOPBACK_OTHERS_MIB")) {
      for (std::size_t& used : made->used) used += std::strtoull(others, nullptr, 10) << 20;
    }
    return made;
  }();
  return the;
}

Entry::Entry(const void* polled) : lock_(machine().mutex), result_(kSuccess) {
  Machine& all = machine();
  if (polled != nullptr && std::exchange(all.polled, polled) == polled) return;
  all.polled = polled;
  ++all.calls;
  if (all.fail_at > 0 && all.calls >= all.fail_at && all.calls < all.fail_at + all.fails)
    result_ = all.fail_with;
}

// Small numbers other than the driver's own stand for the legacy stream: names that a test can tell apart.
Stream* stream_of(void* handle, bool per_thread) {
  thread_local Stream own;
  const int device = current_device < 0 ? 0 : current_device;
  const auto value = reinterpret_cast<std::uintptr_t>(handle);
  if (value == 2 || (value == 0 && per_thread)) {
    own.device = device;
    return &own;
  }
  if (value < 0x1000 && value != 2) return &machine().legacy[device];
  auto* stream = static_cast<Stream*>(handle);
  return machine().streams.count(stream) != 0 ? stream : nullptr;
}

}  // namespace terrace::loopback
