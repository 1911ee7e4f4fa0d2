// Runs that have ended: as the daemon remembers them, or in the file that one of them wrote.
#pragma once

#include <string>
#include <vector>

#include "daemon/node_status.hpp"

namespace terrace {

// The ended processes of one `terrace run`, or one that was started without it.
struct EndedRun {
  std::string run;  // hex; zeros: none
  std::string job;
  std::uint64_t processes = 0;
  ProcessStatus total;  // peaks of the largest process, sums of the rest
};
// The last ended first.
[[nodiscard]] std::vector<EndedRun> ended_runs(const std::vector<ProcessStatus>& ended);
[[nodiscard]] std::string history_text(const std::vector<EndedRun>& runs);
// [{"run", "job", "processes", ...}], one line.
[[nodiscard]] std::string history_json(const std::vector<EndedRun>& runs);

// A result of `moe_trainer --json`, or a trace of `terrace run --record`, in a few lines. Errors: kIo (cannot
// be read), kInvalidArgument (neither of the two, or damaged).
[[nodiscard]] Result<std::string> file_history(const std::string& file);

}  // namespace terrace
