// The machine behind the loopback driver: two devices of host memory that nobody looks into, streams that are
// idle until a test makes them busy, and a call that fails when a test wants it to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace terrace::loopback {

inline constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201,
                     kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kCaptureUnsupported = 900,
                     kCaptureInvalidated = 901, kCaptureImplicit = 906, kUnknown = 999;
inline constexpr std::size_t kCapacity = std::size_t{16} << 30;
inline constexpr std::size_t kContextBytes = std::size_t{64} << 20;
inline constexpr std::size_t kGranularity = std::size_t{2} << 20;
inline constexpr int kDevices = 2;

using Pointer = std::uint64_t;

struct Stream {
  int device = 0;
  bool busy = false;  // events recorded now are not reached
  bool capturing = false;
  bool broken = false;  // the capture
  std::uint64_t recorded = 0, reached = 0;
};
struct Event {
  Stream* stream = nullptr;
  std::uint64_t point = 0;
};
// Physical memory: alive while its handle or a mapping holds it.
struct Physical {
  int device = -1;  // -1: the host's
  std::size_t bytes = 0;
  int references = 1, mappings = 0;
  bool imported = false;
};
struct Block {
  int device = -1;
  std::size_t bytes = 0;
  enum class Kind { kPlain, kPool, kHost, kArray, kGraph } kind = Kind::kPlain;
};

// One process's view. Every member is under the lock.
struct Machine {
  std::mutex mutex;
  std::size_t used[kDevices] = {kContextBytes, kContextBytes};
  std::map<Pointer, Block> blocks;
  std::map<Pointer, Physical> handles;         // also such whose references are gone, while mapped
  std::map<Pointer, Pointer> mappings;         // address to handle
  std::map<Pointer, std::size_t> ranges;       // reserved
  std::map<Pointer, std::vector<int>> access;  // devices let in, by mapping
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::map<std::pair<Stream*, Stream*>, int> waits;  // of the first for the second
  Stream legacy[kDevices] = {{0}, {1}};
  std::uint64_t reserved_high[kDevices] = {}, used_high[kDevices] = {};
  Pointer next_address = 0x7000000000, next_handle = 0x100;
  long calls = 0, fail_at = 0, fails = 1;  // calls that can fail; the first that does, and how many
  int fail_with = kUnknown;
  const void* polled = nullptr;  // asked again and again, it counts once
  int captures = 0;
};
Machine& machine();

// Locks, and counts a call: result() is what a test wants it to answer.
class Entry {
 public:
  explicit Entry(const void* polled = nullptr);
  [[nodiscard]] int result() const { return result_; }
  [[nodiscard]] Machine* operator->() const { return &machine(); }

 private:
  std::lock_guard<std::mutex> lock_;
  int result_;
};

// This thread's context is &machine().legacy[device]'s address; null before one is set.
extern thread_local int current_device;  // -1: no context
extern thread_local int capture_mode;    // 2: relaxed

[[nodiscard]] Stream* stream_of(void* handle, bool per_thread);

}  // namespace terrace::loopback
