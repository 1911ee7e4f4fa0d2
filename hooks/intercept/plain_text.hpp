// Comparing names without the C library.
//
// A library that stands in front of the C library's functions, as a sanitizer's runtime does, begins by
// asking dlsym for the real ones. dlsym is ours, and until it has answered, such a function leads nowhere.
#pragma once

namespace terrace::hooks {

[[nodiscard]] constexpr bool same_text(const char* a, const char* b) {
  for (; *a == *b; ++a, ++b) {
    if (*a == '\0') return true;
  }
  return false;
}

// Behind the last '/'.
[[nodiscard]] constexpr const char* file_name_of(const char* path) {
  const char* file = path;
  for (; *path != '\0'; ++path) {
    if (*path == '/') file = path + 1;
  }
  return file;
}

}  // namespace terrace::hooks
