// Assertions are for programmer errors, in three tiers; operating errors are values (runtime/result.hpp).
//
//   TERRACE_CHECK     always on: cheap, and what follows would corrupt memory
//   TERRACE_DCHECK    debug builds: cheap, but on a hot path
//   TERRACE_PARANOID  TERRACE_PARANOID builds: walks whole structures
//
// Each takes the condition and a literal that says what was promised. A failure prints one line on stderr and
// aborts.
#pragma once

namespace terrace {
[[noreturn]] void assertion_failed(const char* condition, const char* promise, const char* file,
                                   int line) noexcept;
}  // namespace terrace

#define TERRACE_CHECK(condition, promise) \
  (static_cast<bool>(condition) ? void(0) \
                                : ::terrace::assertion_failed(#condition, promise, __FILE__, __LINE__))

#ifndef NDEBUG
#define TERRACE_DCHECK(condition, promise) TERRACE_CHECK(condition, promise)
#else
#define TERRACE_DCHECK(condition, promise) void(0)
#endif

#ifdef TERRACE_PARANOID_CHECKS
#define TERRACE_PARANOID(condition, promise) TERRACE_CHECK(condition, promise)
#else
#define TERRACE_PARANOID(condition, promise) void(0)
#endif
