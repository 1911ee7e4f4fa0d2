#include "runtime/trace/recorder.hpp"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "runtime/clock.hpp"
#include "runtime/errno_kept.hpp"
#include "runtime/trace/live_ids.hpp"
#include "runtime/trace/recording_file.hpp"

namespace terrace::trace {
namespace detail {
constinit std::atomic<RecorderState> recorder_state{RecorderState::kNotAsked};
}  // namespace detail

namespace {

using detail::recorder_state;
using detail::RecorderState;

constexpr std::size_t kBufferBytes = 64 << 10;
constexpr Nanoseconds kFlushEvery = std::chrono::milliseconds(20);
constexpr int kExitPatience = 1000;  // turns given to another thread that holds the lock at exit

// Every member is under the mutex. Constant-initialised and never destroyed: it serves the process's first
// call and its last.
struct Recorder {
  std::mutex mutex;
  RecordingFile file;
  EventEncoder encoder;
  LiveIds live;
  Layer layer = Layer::kPool;
  std::array<char, kMostNameBytes> device_kind{'u', 'n', 'k', 'n', 'o', 'w', 'n'};  // zeros behind it
  bool process_watched = false;                                                     // forks and the exit
  bool exiting = false;                                                             // nobody will flush later
  Nanoseconds began{};
  Nanoseconds flushed{};
  std::uint32_t threads = 0;
  std::size_t used = 0;  // of the buffer

  [[nodiscard]] std::string_view kind_text() const noexcept {
    return {device_kind.data(), strnlen(device_kind.data(), device_kind.size())};
  }
  bool begin() noexcept;
  void add(Event event) noexcept;
  void add_free(std::uint64_t id, std::uint64_t stream) noexcept;
  void flush() noexcept;
  void settle(RecordingFile::Outcome outcome) noexcept;
};
constinit Recorder the_recorder;
constinit std::array<std::byte, kBufferBytes> buffer{};  // under its mutex too

constinit thread_local std::uint32_t thread_number = 0;  // from 1; 0: none yet

void watch_process() noexcept {
  the_recorder.process_watched = true;
  pthread_atfork([] { the_recorder.mutex.lock(); }, [] { the_recorder.mutex.unlock(); },
                 [] {
                   // What the buffer holds is the parent's to write.
                   the_recorder.file.close();
                   the_recorder.encoder = {};
                   the_recorder.live.clear();
                   the_recorder.used = 0;
                   the_recorder.threads = 0;
                   thread_number = 0;
                   recorder_state.store(RecorderState::kNotAsked, std::memory_order_relaxed);
                   the_recorder.mutex.unlock();
                 });
  (void)std::atexit([] {
    int turns = 0;
    while (!the_recorder.mutex.try_lock()) {
      if (++turns == kExitPatience) return;
      sched_yield();
    }
    the_recorder.exiting = true;
    if (recorder_state.load(std::memory_order_relaxed) == RecorderState::kOn) the_recorder.flush();
    the_recorder.mutex.unlock();
  });
}

// The path that the environment gives this process; null where it gives none, or one that is too long.
const char* path_for_process(std::array<char, PATH_MAX>& place) noexcept {
  const char* asked = std::getenv("TERRACE_RECORD");
  if (asked == nullptr || *asked == '\0') return nullptr;
  const char* started = std::getenv("TERRACE_RECORD_PID");
  const long own = getpid();
  const bool named = started != nullptr && std::strtol(started, nullptr, 10) == own;
  const int length = named ? std::snprintf(place.data(), place.size(), "%s", asked)
                           : std::snprintf(place.data(), place.size(), "%s.%ld", asked, own);
  return length > 0 && static_cast<std::size_t>(length) < place.size() ? place.data() : nullptr;
}

bool Recorder::begin() noexcept {
  std::array<char, PATH_MAX> place{};
  const char* path = path_for_process(place);
  if (path == nullptr) {
    recorder_state.store(RecorderState::kOff, std::memory_order_relaxed);
    return false;
  }
  if (!process_watched) watch_process();
  recorder_state.store(RecorderState::kOn, std::memory_order_relaxed);
  settle(file.open(path, layer));
  if (recorder_state.load(std::memory_order_relaxed) != RecorderState::kOn) return false;
  began = steady_clock().now();
  flushed = began - kFlushEvery;
  used = encode_header(std::span(buffer).first<kMostHeaderBytes>(), layer, kind_text(),
                       program_invocation_short_name);
  return true;
}

// Whatever is not done ends the recording; a failure is said.
void Recorder::settle(RecordingFile::Outcome outcome) noexcept {
  if (outcome == RecordingFile::Outcome::kDone) return;
  used = 0;
  recorder_state.store(RecorderState::kOff, std::memory_order_relaxed);
  if (outcome != RecordingFile::Outcome::kFailed) return;
  const char* reason = strerrordesc_np(errno);
  std::array<char, PATH_MAX> place{};
  const char* path = path_for_process(place);
  std::array<char, PATH_MAX + 128> line{};
  const int length = std::snprintf(line.data(), line.size(), "terrace: recording into %s ended: %s\n",
                                   path == nullptr ? "a trace" : path, reason == nullptr ? "error" : reason);
  if (length > 0) (void)!::write(STDERR_FILENO, line.data(), static_cast<std::size_t>(length));
}

void Recorder::flush() noexcept {
  if (used == 0) return;
  settle(file.write(std::span(buffer).first(used)));
  used = 0;
}

void Recorder::add(Event event) noexcept {
  if (thread_number == 0) thread_number = ++threads;
  event.thread = thread_number - 1;
  const Nanoseconds now = steady_clock().now();
  event.microseconds =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now - began).count());
  used += encoder.encode(std::span(buffer).subspan(used).first<kMostEventBytes>(), event);
  if (exiting || now - flushed >= kFlushEvery || buffer.size() - used < kMostEventBytes) {
    flushed = now;
    flush();
  }
}

void Recorder::add_free(std::uint64_t id, std::uint64_t stream) noexcept {
  add({.kind = Event::Kind::kFree, .id = id, .size = {}, .stream = stream, .pool = kUnknown});
}

}  // namespace

bool recording_is_asked_for() noexcept {
  const char* path = recording() ? std::getenv("TERRACE_RECORD") : nullptr;
  return path != nullptr && *path != '\0';
}

void describe_recording(Layer layer, std::string_view device_kind) noexcept {
  if (!recording()) return;
  const std::lock_guard lock(the_recorder.mutex);
  // Before whoever describes itself watches for forks: its lock, which it holds when it tells of a block, is
  // then taken before this one.
  if (!the_recorder.process_watched && recording_is_asked_for()) watch_process();
  the_recorder.layer = layer;
  the_recorder.device_kind = {};
  device_kind.copy(the_recorder.device_kind.data(), kMostNameBytes);
}

namespace detail {

// The state is asked again under the lock: another thread may have begun, or ended, the recording.
bool ready() noexcept {
  const RecorderState state = recorder_state.load(std::memory_order_relaxed);
  return state == RecorderState::kOn || (state == RecorderState::kNotAsked && the_recorder.begin());
}

void record_allocate(const void* address, Bytes size, std::uint64_t stream,
                     std::optional<Pool> pool) noexcept {
  if (address == nullptr || size > kLargestBlock) return;
  const ErrnoKept kept;
  const std::lock_guard lock(the_recorder.mutex);
  if (!ready()) return;
  const auto key = reinterpret_cast<std::uintptr_t>(address);
  if (const auto unseen = the_recorder.live.take(key)) {
    the_recorder.add_free(*unseen, stream);
    if (!ready()) return;
  }
  const std::uint64_t id = the_recorder.encoder.allocations();
  if (!the_recorder.live.put(key, id)) return;
  the_recorder.add({.kind = Event::Kind::kAllocate, .id = id, .size = size, .stream = stream, .pool = pool});
}

void record_free(const void* address, std::uint64_t stream) noexcept {
  if (address == nullptr) return;
  const ErrnoKept kept;
  const std::lock_guard lock(the_recorder.mutex);
  if (!ready()) return;
  if (const auto id = the_recorder.live.take(reinterpret_cast<std::uintptr_t>(address))) {
    the_recorder.add_free(*id, stream);
  }
}

}  // namespace detail
}  // namespace terrace::trace
