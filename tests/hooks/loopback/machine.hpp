// The machine behind the loopback driver: two devices of host memory, streams that do what they are given on
// threads of their own, or look busy because a test says so, and a call that fails when a test wants it to.
//
// Memory is real: what a kernel or a copy reaches through an address that is not mapped, or to which no
// access is granted, is a fault.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace terrace::loopback {

inline constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201,
                     kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kIllegalAddress = 700,
                     kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureImplicit = 906,
                     kUnknown = 999;
inline constexpr std::size_t kCapacity = std::size_t{16} << 30;
inline constexpr std::size_t kContextBytes = std::size_t{64} << 20;
inline constexpr std::size_t kGranularity = std::size_t{2} << 20;
inline constexpr int kDevices = 2;

using Pointer = std::uint64_t;

// Plain memory of both devices, and of the host.
inline constexpr Pointer kPlainMemory = 0x7000000000;
inline constexpr std::size_t kPlainBytes = std::size_t{1} << 40;

struct Stream;
// What a stream has been given: to wait for another's point, to run something, to reach a point of its own.
struct Work {
  std::function<void()> run{};
  Stream* behind = nullptr;
  std::uint64_t until = 0;
  std::uint64_t reach = 0;
};
// What was captured, and the memory that lay under its pointers then.
struct Graph {
  std::vector<std::function<void()>> runs;
  std::map<Pointer, Pointer> seen;  // start of a mapping to its handle
};
struct Kernel {
  const char* name;
  void (*run)(void** parameters);
  std::vector<std::size_t> sizes;
  bool told;  // cuFuncGetParamInfo knows it
};

struct Stream {
  int device = 0;
  std::deque<Work> work{};  // the first is being done
  bool served = false;      // by a thread, for good
  Graph* graph = nullptr;   // being captured
  bool busy = false;        // events recorded now are not reached
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
  int file = -1;
};
struct Block {
  int device = -1;
  std::size_t bytes = 0;
  enum class Kind { kPlain, kPool, kHost, kArray, kGraph } kind = Kind::kPlain;
};

// One process's view. Every member is under the lock.
struct Machine {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t used[kDevices] = {kContextBytes, kContextBytes};
  std::map<Pointer, Block> blocks;
  std::map<Pointer, Physical> handles;         // also such whose references are gone, while mapped
  std::map<Pointer, Pointer> mappings;         // address to handle
  std::map<Pointer, std::size_t> ranges;       // reserved
  std::map<Pointer, std::vector<int>> access;  // devices let in, by mapping
  std::set<Stream*> streams;
  std::set<Stream*> served;  // streams with a thread
  std::set<Kernel*> kernels;
  std::set<Graph*> graphs;
  std::set<Event*> events;
  std::map<std::pair<Stream*, Stream*>, int> waits;  // of the first for the second
  Stream legacy[kDevices] = {{0}, {1}};
  std::uint64_t reserved_high[kDevices] = {}, used_high[kDevices] = {};
  Pointer next_address = kPlainMemory, next_handle = 0x100;
  long calls = 0, fail_at = 0, fails = 1;  // calls that can fail; the first that does, and how many
  int fail_with = kUnknown;
  long lost_at = 0;              // the call from which on the device is lost, as by a kernel that faults
  std::size_t refuse = 0;        // physical memory of just this size
  const void* polled = nullptr;  // asked again and again, it counts once
  int captures = 0;
  int slow = 0;  // milliseconds that a large copy takes, and the gap between an unmapping and what comes next
};
Machine& machine();

// Locks, and counts a call: result() is what a test wants it to answer.
class Entry {
 public:
  explicit Entry(const void* polled = nullptr);
  [[nodiscard]] int result() const { return result_; }
  [[nodiscard]] Machine* operator->() const { return &machine(); }
  // Without the lock meanwhile.
  template <typename Condition>
  void wait(const Condition& condition) {
    machine().changed.wait(lock_, condition);
  }

 private:
  std::unique_lock<std::mutex> lock_;
  int result_;
};

// This thread's context is &machine().legacy[device]'s address; null before one is set.
extern thread_local int current_device;  // -1: no context
extern thread_local int capture_mode;    // 2: relaxed

[[nodiscard]] Stream* stream_of(void* handle, bool per_thread);

// With the lock. Work is done in order, on the stream's thread, without the lock.
void give_work(Stream& stream, Work work);
// A stream's work is over, or all streams'.
void await_work(Entry& entry, Stream& stream);
void await_all_work(Entry& entry);

}  // namespace terrace::loopback
