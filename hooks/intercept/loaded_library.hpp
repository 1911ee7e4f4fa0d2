// Finds the real function behind an intercepted one, in libraries the process has already loaded. Never loads
// one, and never lets go of one it has found a function in.
#pragma once

namespace terrace::hooks {

// The next definition of `symbol` after this library in the global scope; else the one in a loaded library
// whose file name begins with `library` ("libcudart.so"), however it was loaded: plugins of frameworks load
// theirs locally. Null where there is none. Cheap to ask again, not free: the caller keeps what it gets.
[[nodiscard]] void* find_real_function(const char* library, const char* symbol) noexcept;

// The same, in the global scope alone.
[[nodiscard]] void* find_next_function(const char* symbol) noexcept;

// Whether `function` lies in a loaded library whose file name begins with `library`.
[[nodiscard]] bool is_in_library(const void* function, const char* library) noexcept;

// Whether such a library is loaded.
[[nodiscard]] bool is_loaded(const char* library) noexcept;

// Keeps the library that holds `function` loaded until the process ends.
void keep_loaded(const void* function) noexcept;

}  // namespace terrace::hooks
