// Where a test finds the sources and the build: as compiled, or as TERRACE_SOURCE_DIR and TERRACE_BUILD_DIR
// in the environment say. A bundle carries tests to a machine on which the compiled-in folders do not exist,
// so a test that opens a file or starts a program asks here.
#pragma once

#include <cstdlib>
#include <filesystem>

#include "build_paths.hpp"

namespace terrace::test {

inline std::filesystem::path folder_from(const char* variable, const char* compiled_in) {
  const char* set = std::getenv(variable);
  return set != nullptr && *set != '\0' ? set : compiled_in;
}

inline std::filesystem::path source_dir() { return folder_from("TERRACE_SOURCE_DIR", TERRACE_SOURCE_DIR); }
inline std::filesystem::path build_dir() { return folder_from("TERRACE_BUILD_DIR", TERRACE_BUILD_DIR); }

// Programs and shared libraries as the build lays them out.
inline std::filesystem::path program(const char* name) { return build_dir() / "bin" / name; }
inline std::filesystem::path shared_library(const char* name) { return build_dir() / "lib" / name; }

}  // namespace terrace::test
