// A gzipped tar archive (POSIX ustar) of texts.
#pragma once

#include <string>
#include <vector>

#include "runtime/result.hpp"

namespace terrace {

struct TarMember {
  std::string name;  // at most 99 bytes
  std::string text;
};

// Writes a new file that only this user may read. Nothing of it stays on failure. Errors: kIo (it exists, or
// can't be written).
[[nodiscard]] Status write_tar_gz(const std::string& path, const std::vector<TarMember>& members);

}  // namespace terrace
