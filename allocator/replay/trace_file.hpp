// A trace on disk, as recorded or compressed with gzip.
#pragma once

#include <string>

#include "runtime/trace/reader.hpp"

namespace terrace {

// Errors: kIo (cannot be opened or read, damaged compression), and those of trace::Reader::open. A compressed
// file that breaks off reads like a trace that breaks off.
[[nodiscard]] Result<trace::Reader> open_trace(const std::string& path);

}  // namespace terrace
