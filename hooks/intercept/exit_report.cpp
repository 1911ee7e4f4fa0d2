#include "hooks/intercept/exit_report.hpp"

#include <cstdio>

namespace terrace::hooks {
namespace {

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f s", value);
  return text;
}
std::string share(double part, double whole) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f%%", whole > 0 ? part / whole * 100 : 0.0);
  return text;
}

std::string rate(Bytes bytes, double in_seconds) {
  char text[32];
  std::snprintf(text, sizeof text, " at %.1f GB/s",
                in_seconds > 0 ? static_cast<double>(bytes.count()) * 1e-9 / in_seconds : 0.0);
  return text;
}

}  // namespace

std::string exit_report(const ExitFigures& figures) {
  if (figures.spilled == 0_B) return {};
  const std::string begin = "terrace: device " + std::to_string(figures.device) + ": ";
  const double stalled = figures.for_restores + figures.at_gates + figures.for_room;
  std::string lines = begin + "HBM peak " + format_bytes(figures.hbm_peak) + " of " +
                      format_bytes(figures.hbm_budget) + ", DDR peak " + format_bytes(figures.ddr_peak) +
                      "; spilled " + format_bytes(figures.spilled) +
                      rate(figures.spilled, figures.spill_seconds) + ", restored " +
                      format_bytes(figures.restored) + rate(figures.restored, figures.restore_seconds) + "\n";
  lines += begin + "waited " + seconds(stalled) + " (" + share(stalled, figures.run) +
           " of the run): " + seconds(figures.for_restores) + " for blocks to come back, " +
           seconds(figures.at_gates) + " at moving ones, " + seconds(figures.for_room) + " for room; " +
           std::to_string(figures.uses_in_ddr) + " uses over the link\n";
  lines += begin + "blocks were on their way for " + seconds(figures.moving) + ", both ways for " +
           seconds(figures.both_ways) + "; " + seconds(figures.remapping) + " to remap them, " +
           seconds(figures.finding) + " to find memory (" + format_bytes(figures.ddr_made) +
           " of DDR made); " + std::to_string(figures.ahead) + " ordered ahead, " +
           std::to_string(figures.late) + " asked for, " + std::to_string(figures.shown) + " shown in DDR\n";
  lines +=
      begin + (figures.step > 0 ? "a step of " + std::to_string(figures.step) + " uses was learned"
                                : std::string("no repeating step was learned: the least recent left first"));
  lines += "; " + std::to_string(figures.launches) + " launches read";
  if (figures.opaque_launches > 0)
    lines += ", " + std::to_string(figures.opaque_launches) +
             " held everything, their pointers unknown (the first: " + std::string(figures.first_opaque) +
             ")";
  if (figures.fixed > 0_B) lines += "; " + format_bytes(figures.fixed) + " could not leave";
  lines += "\n" + begin + "with hbm.budget = \"" +
           std::to_string((figures.all_at_once + 1_MiB - 1_B) / 1_MiB) +
           "MiB\" nothing would have left: at most " + seconds(stalled) + " less\n";
  return lines;
}

}  // namespace terrace::hooks
