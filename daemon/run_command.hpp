// `terrace run`: a command with a daemon at its side and a memory report at its end.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "swapcore/policy/policy.hpp"

namespace terrace {

struct RunOptions {
  std::string policy_file;  // empty: the defaults
  std::string socket;       // empty: the environment's, else the policy's
  std::string listen;       // of a daemon that is started; empty: the policy's
  std::string job;          // empty: the command's name
  std::string record;       // the trace to write; empty: none
  std::string allocator;    // "native", "terrace"; empty: native
  std::vector<std::string> command;
};

// Returns the exit code for the shell: the command's own (daemon/child_run.hpp), or 2 for a refused policy,
// an allocator that contradicts PyTorch's settings, or a trace that can't be written. Writes nothing on
// stdout. A command that never registered with the daemon gets no report.
[[nodiscard]] int run_command(const RunOptions& options, const std::filesystem::path& programs);

// The socket to use: `given`, else TERRACE_SOCKET, else the policy's or its fallback
// (daemon/socket_path.hpp).
[[nodiscard]] Result<std::string> socket_for(const std::string& given, const Policy& policy);
// The policy in `file`, or the defaults where it is empty.
[[nodiscard]] Result<Policy> policy_from(const std::string& file);

// The lines of the report from a status reply (daemon/status_json.hpp); empty where the run has no process.
[[nodiscard]] std::string memory_report(const std::string& status_json);

}  // namespace terrace
