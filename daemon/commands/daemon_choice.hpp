// The daemon that a subcommand talks to: --socket, or the socket of --policy.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "daemon/observer.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {

struct DaemonChoice {
  std::string socket, policy_file;  // as given; empty: not given
};
void add_daemon_options(CLI::App& command, DaemonChoice& choice);

// Connects to it. Errors: kInvalidArgument (the policy is refused; its text has the position), kNotFound (no
// daemon there), else as Observer::connect.
[[nodiscard]] Result<Observer> connect(const DaemonChoice& choice);
// Prints the error and returns the exit code.
int say_failure(const Error& error);

}  // namespace terrace
