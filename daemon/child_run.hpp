// Runs a command as if it had been started directly: signals go on to it, its exit code comes back.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace terrace {

struct ChildRun {
  std::vector<std::string> command;                              // at least the program; found in PATH
  std::vector<std::pair<std::string, std::string>> environment;  // set for the command on top of ours
  std::string pid_variable;  // set to the command's process id, for it to know itself by; empty: none
};

// Returns the exit code as a shell would give it: the command's own, 128 + signal where a signal ended it,
// 127 where it was not found, 126 where it could not be executed (one line on stderr says so). Sent SIGINT,
// SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 or SIGUSR2, the caller passes it on; a terminal's signal has reached the
// command already, which is in the same process group.
[[nodiscard]] int run_child(const ChildRun& run);

}  // namespace terrace
