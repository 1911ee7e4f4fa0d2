// Names for what this thread launches, in the timeline of a profiler that has attached (NVTX ranges on CUDA).
//
// Without CUDA, or without a profiler, nothing looks at them: ask first, and make up no names.
#pragma once

namespace terrace {

// Whether a profiler listens: found out once.
[[nodiscard]] bool profiler_listens();
// Ranges of one thread nest.
void push_profiler_range(const char* name);
void pop_profiler_range();

}  // namespace terrace
