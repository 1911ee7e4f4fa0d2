// `terrace replay`: a recorded trace against an allocator, and a report.
#pragma once

#include <string>

#include "allocator/replay/replay.hpp"

namespace terrace {

enum class ReportForm : std::uint8_t { kText, kJson };

struct ReplayOptions {
  std::string trace;
  std::string allocator = "terrace";  // "terrace", "baseline", or a plugin's file
  std::string device = "auto";        // "auto", "cuda", "emulated"
  std::string budget;                 // a size; empty: what the device has
  ReportForm form = ReportForm::kText;
};

// Returns the exit code: 0 with the report on stdout; 2 where the options or the trace are refused, 1 where
// the device or the allocator fails, with one line on stderr. Allocations that the budget refuses are part of
// the report, and no failure of the command. An emulated device has the budget, or twice the trace's peak:
// its memory is never touched, so it may be more than the machine has.
[[nodiscard]] int replay_command(const ReplayOptions& options);

// What a report says about where it was made.
struct ReplayPlace {
  std::string trace;   // as given
  std::string device;  // "cuda", "emulated", or "host" for a plugin without a device
  Bytes budget;
};
[[nodiscard]] std::string replay_text(const ReplayPlace& place, const trace::Header& header,
                                      const TraceSummary& summary, const ReplayReport& report);
// One line of JSON, without the newline.
[[nodiscard]] std::string replay_json(const ReplayPlace& place, const trace::Header& header,
                                      const TraceSummary& summary, const ReplayReport& report);

}  // namespace terrace
