// The file of `terrace run --record FILE`, before and after the command.
#pragma once

#include <string>

#include "runtime/result.hpp"

namespace terrace {

// Makes sure that the command will be able to write `file`, and empties it. Errors: kIo (cannot be written,
// is no plain file), kInvalidArgument (another recording is writing it).
[[nodiscard]] Status prepare_record_target(const std::string& file);

// One line where the command has recorded nothing into `file`; else empty.
[[nodiscard]] std::string record_notice(const std::string& file);

}  // namespace terrace
