// One small pool of threads for every operator of this process.
//
// parallel_for(n, body) runs body(chunk, worker) once for each chunk in [0, n) and returns when all have run.
// Which thread takes a chunk is left to timing, so a result must depend on the chunk alone: `worker`
// (below worker_count()) only names scratch that no other chunk uses at the same time. Calls from several
// threads take turns; a call from inside a body runs its chunks on the calling thread, as its worker. What a
// body throws reaches the caller.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace terrace::trainer::cpu {

[[nodiscard]] std::int64_t worker_count();  // hardware threads, at least 1

namespace detail {
using ChunkBody = void (*)(void* context, std::int64_t chunk, std::int64_t worker);
void run_chunks(std::int64_t chunks, ChunkBody body, void* context);
}  // namespace detail

template <typename Body>
void parallel_for(std::int64_t chunks, Body&& body) {
  detail::run_chunks(
      chunks,
      [](void* context, std::int64_t chunk, std::int64_t worker) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(chunk, worker);
      },
      &body);
}

// Cuts [0, count) into ranges of `grain` and runs body(begin, end) on each: the cut depends on nothing else.
template <typename Body>
void parallel_ranges(std::int64_t count, std::int64_t grain, Body&& body) {
  const std::int64_t chunks = (count + grain - 1) / grain;
  parallel_for(chunks, [&](std::int64_t chunk, std::int64_t) {
    body(chunk * grain, std::min(count, (chunk + 1) * grain));
  });
}

}  // namespace terrace::trainer::cpu
