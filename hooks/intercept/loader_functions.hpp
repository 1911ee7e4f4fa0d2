// The C library's own dlsym and dlvsym, which this library stands in front of.
//
// Found by reading the symbol tables of the loaded C library: asking the loader by name would ask ourselves.
#pragma once

namespace terrace::hooks {

struct LoaderFunctions {
  void* (*dlsym)(void* handle, const char* name) = nullptr;
  void* (*dlvsym)(void* handle, const char* name, const char* version) = nullptr;
};

// Both are found, or the process could not have been started. Safe before any constructor has run.
[[nodiscard]] const LoaderFunctions& loader_functions() noexcept;

}  // namespace terrace::hooks
