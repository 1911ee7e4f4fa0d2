// Where the daemon's socket is, for those who start it and those who look for it.
#pragma once

#include <string>

#include "runtime/result.hpp"

namespace terrace {

// `from_policy` where its folder can be used by this user or a socket is there already; else a private
// folder: $XDG_RUNTIME_DIR/terrace/terraced.sock, or terrace-UID/terraced.sock in the folder for temporary
// files. Errors: kIo where the private folder belongs to somebody else.
[[nodiscard]] Result<std::string> choose_socket(const std::string& from_policy);

}  // namespace terrace
