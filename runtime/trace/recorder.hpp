// Records the allocations of this process into a trace, where the environment asks for it.
//
//   TERRACE_RECORD=PATH      record. The process TERRACE_RECORD_PID writes PATH, every other PATH.PID
//   TERRACE_RECORD_PID=PID   the process that `terrace run --record PATH` started
//
// Whoever hands out device memory calls record_allocate and record_free. An allocation is told after it has
// succeeded and a free before it happens: so no address is seen live twice. Where nothing is recorded a call
// costs one relaxed load.
//
// It works inside any call of any process: bounded memory, no heap, no thread, errno kept, nothing thrown. A
// buffer goes to the file when it is full, with the first event that comes 20 ms after it went the last time,
// and at exit; a process that is killed or leaves by _exit loses no more than what came after. What cannot be
// written ends the recording with one line on stderr. A forked child records into a file of its own, from
// nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

#include "runtime/trace/format.hpp"

namespace terrace::trace {

namespace detail {
enum class RecorderState : std::uint8_t { kNotAsked, kOn, kOff };
extern std::atomic<RecorderState> recorder_state;
void record_allocate(const void* address, Bytes size, std::uint64_t stream,
                     std::optional<Pool> pool) noexcept;
void record_free(const void* address, std::uint64_t stream) noexcept;
}  // namespace detail

// False once it is known that nothing is recorded; before the first event it is not known.
[[nodiscard]] inline bool recording() noexcept {
  return detail::recorder_state.load(std::memory_order_relaxed) != detail::RecorderState::kOff;
}

// Whether the environment asks for a recording: for whoever has a faster path that tells nothing.
[[nodiscard]] bool recording_is_asked_for() noexcept;

// For the header; before the first event ("cuda", "emulated"). Without it: the pool layer, of an unknown
// kind.
void describe_recording(Layer layer, std::string_view device_kind) noexcept;

// Null addresses and blocks above kLargestBlock are not recorded. Where `address` is live already, its free
// was not seen: it is recorded first.
inline void record_allocate(const void* address, Bytes size, std::uint64_t stream,
                            std::optional<Pool> pool) noexcept {
  if (recording()) detail::record_allocate(address, size, stream, pool);
}
// The free of an address that is not live in the trace is none.
inline void record_free(const void* address, std::uint64_t stream) noexcept {
  if (recording()) detail::record_free(address, stream);
}

}  // namespace terrace::trace
