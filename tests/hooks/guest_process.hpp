// Runs a program with a chosen environment and keeps what it printed.
#pragma once

#include <string>
#include <vector>

namespace terrace::test {

struct Ended {
  int exit_code = -1;  // negative: the signal that ended it
  std::string out, err;
};

// `environment` holds "NAME=value" and replaces what this process has of the same names.
[[nodiscard]] Ended run_program(const std::vector<std::string>& command,
                                const std::vector<std::string>& environment);

}  // namespace terrace::test
