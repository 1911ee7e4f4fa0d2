#include "tests/hooks/loopback/machine.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

namespace terrace::loopback {

thread_local int current_device = -1;
thread_local int capture_mode = 0;

Machine& machine() {
  static Machine& the = *[] {
    auto* made = new Machine;  // outlives every destructor that frees
    // A forked child has no threads of its parent's, nor what they wait for.
    pthread_atfork(nullptr, nullptr, [] {
      Machine& all = machine();
      new (&all.mutex) std::mutex;
      new (&all.changed) std::condition_variable;
      for (Stream* stream : std::exchange(all.served, {})) stream->work.clear(), stream->served = false;
    });
    // Nothing of it is there until it is touched.
    mmap(reinterpret_cast<void*>(kPlainMemory), kPlainBytes, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (const char* at = std::getenv("LOOPBACK_FAIL_AT")) made->fail_at = std::atol(at);
    if (const char* at = std::getenv("LOOPBACK_LOST_AT")) made->lost_at = std::atol(at);
    if (const char* count = std::getenv("LOOPBACK_FAILS")) made->fails = std::atol(count);
    if (const char* slow = std::getenv("LOOPBACK_SLOW_MS")) made->slow = std::atoi(slow);
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
  const bool again = polled != nullptr && all.polled == polled;
  all.polled = polled;
  if (!again) ++all.calls;
  if (all.lost_at > 0 && all.calls >= all.lost_at) {
    result_ = kIllegalAddress;
    return;
  }
  if (again) return;
  if (all.fail_at > 0 && all.calls >= all.fail_at && all.calls < all.fail_at + all.fails)
    result_ = all.fail_with;
}

// Small numbers other than the driver's own stand for the legacy stream: names that a test can tell apart.
Stream* stream_of(void* handle, bool per_thread) {
  thread_local Stream* const kept = new Stream;  // its work may outlive the thread
  Stream& own = *kept;
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

namespace {

void serve(Stream* stream) {
  Machine& all = machine();
  std::unique_lock lock(all.mutex);
  for (;;) {
    all.changed.wait(lock, [&] { return !stream->work.empty(); });
    Work& work = stream->work.front();
    if (work.behind != nullptr) all.changed.wait(lock, [&] { return work.behind->reached >= work.until; });
    if (work.run) {
      lock.unlock();
      work.run();
      lock.lock();
    }
    if (work.reach > stream->reached) stream->reached = work.reach;
    stream->work.pop_front();
    all.changed.notify_all();
  }
}

}  // namespace

void give_work(Stream& stream, Work work) {
  stream.work.push_back(std::move(work));
  if (!stream.served) {
    stream.served = true;
    machine().served.insert(&stream);
    std::thread(serve, &stream).detach();
  }
  machine().changed.notify_all();
}

void await_work(Entry& entry, Stream& stream) {
  entry.wait([&] { return stream.work.empty(); });
}

void await_all_work(Entry& entry) {
  entry.wait([&] {
    for (const Stream* stream : machine().served) {
      if (!stream->work.empty()) return false;
    }
    return true;
  });
}

}  // namespace terrace::loopback
