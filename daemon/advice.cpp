#include "daemon/advice.hpp"

#include <algorithm>
#include <cstdio>

#include "runtime/units.hpp"

namespace terrace {
namespace {

constexpr double kWorthSaying = 0.01;  // of a step's time
constexpr double kNearlyAll = 0.9;
constexpr double kRoomy = 0.75;

std::string formatted(const char* format, double value) {
  char text[512];
  std::snprintf(text, sizeof text, format, value);
  return text;
}
std::string bytes(double count) {
  return format_bytes(Bytes(static_cast<std::uint64_t>(std::max(count, 0.0))));
}
// As a policy writes it: whole MiB.
std::string written(double count) {
  return "\"" + std::to_string(static_cast<std::uint64_t>(std::max(count, 0.0)) >> 20) + "MiB\"";
}

// What the job counted between the two looks.
struct Seen {
  const JobStatus& now;
  Seconds stalls;
  double steps, seconds;  // of all processes
  double hits, misses, late, evictions, fallbacks, damaged;
  double to_ddr, from_ddr;
  double hbm_used, ddr_used;  // shares of the largest process's part of the job's budget; 0: no budget
  double window_used;         // the fuller direction's; negative: not known

  explicit Seen(const Watched& watched) : now(watched.after) {
    const JobStatus& then = watched.before;
    const auto rose = [](std::uint64_t to, std::uint64_t from) {
      return to > from ? static_cast<double>(to - from) : 0.0;
    };
    for (const auto& [reason, total] : now.stall_seconds.all())
      stalls.set(reason, std::max(0.0, total - then.stall_seconds[reason]));
    steps = rose(now.steps, then.steps);
    seconds = std::max(0.0, now.step_seconds - then.step_seconds);
    hits = rose(now.fetches["hit"], then.fetches["hit"]);
    misses = rose(now.fetches["miss"], then.fetches["miss"]);
    late = rose(now.fetches["late"], then.fetches["late"]);
    evictions = rose(now.evictions, then.evictions);
    fallbacks = rose(now.fallbacks, then.fallbacks);
    damaged = rose(now.damaged_blocks, then.damaged_blocks);
    to_ddr = rose(now.copied_bytes["d2h"], then.copied_bytes["d2h"]);
    from_ddr = rose(now.copied_bytes["h2d"], then.copied_bytes["h2d"]);
    hbm_used = used("hbm");
    ddr_used = used("ddr");
    window_used = -1;
    for (const char* direction : {"d2h", "h2d"}) {
      const double room = rose(now.window_capacity_bytes[direction], then.window_capacity_bytes[direction]);
      if (room > 0)
        window_used =
            std::max(window_used, rose(now.window_bytes[direction], then.window_bytes[direction]) / room);
    }
  }

 private:
  [[nodiscard]] double used(const char* tier) const {
    const double budget = static_cast<double>(now.budget[tier]) /
                          static_cast<double>(std::max<std::uint64_t>(now.processes, 1));
    return budget > 0 ? static_cast<double>(now.peak_bytes[tier]) / budget : 0;
  }
};

std::string observed(const Seen& seen) {
  const double stalled = seen.stalls.sum();
  return seen.now.job + ": " + formatted("%.0f steps", seen.steps) +
         formatted(", %.1f ms each", seen.seconds / seen.steps * 1e3) + "; HBM peak " +
         bytes(static_cast<double>(seen.now.peak_bytes["hbm"])) +
         formatted(" (%.0f%% of its budget)", seen.hbm_used * 100) + "; a step moved " +
         bytes(seen.to_ddr / seen.steps) + " to DDR and " + bytes(seen.from_ddr / seen.steps) + " back" +
         formatted("; waited %.1f%% of the time", seen.seconds > 0 ? stalled / seen.seconds * 100 : 0);
}

// A wait that was counted is worth at most itself.
void advise_on_stalls(const Seen& seen, std::vector<std::pair<double, Suggestion>>& found) {
  const double held = static_cast<double>(seen.now.bytes["ddr"]) /
                      static_cast<double>(std::max<std::uint64_t>(seen.now.processes, 1));
  for (const auto& [reason, waited] : seen.stalls.all()) {
    const double share = seen.seconds > 0 ? waited / seen.seconds : 0;
    if (share < kWorthSaying) continue;
    Suggestion suggestion;
    suggestion.gain = formatted("at most %.1f%% of a step", share * 100);
    if (reason == "restore_late" || reason == "spill_backpressure") {
      suggestion.finding = reason == "restore_late" ? "outputs come back from DDR later than they are needed"
                                                    : "outputs leave for DDR slower than they are made";
      suggestion.policy = "[swapcore]\nddr_budget = " + written(held * kRoomy) + "\n";
    } else if (reason == "budget") {
      suggestion.finding = "compute waits until memory within the budget is free";
      suggestion.policy = seen.ddr_used < kNearlyAll ? "[checkpoint]\ncontingency = \"offload\"\n" : "";
    } else if (reason == "expert_late") {
      suggestion.finding = "experts arrive in HBM later than their layer runs";
      suggestion.policy = "[experts]\nprefetch = 2\n";
    } else if (reason == "router_word") {
      suggestion.finding = "layers wait for their router's word before their experts are fetched";
      suggestion.policy = "[experts]\nload = \"layer\"\n";
    } else if (reason == "optimizer_late") {
      suggestion.finding = "the next forward pass waits for the optimizer's state to go through HBM";
      suggestion.policy = seen.hbm_used < kRoomy ? "[optimizer]\ntier = \"hbm\"\n" : "";
    } else if (reason == "daemon") {
      suggestion.finding =
          "the job waits for leases: others hold the node's memory, which terrace status lists";
    } else {
      suggestion.finding = "compute waits: " + reason;
    }
    found.emplace_back(share, std::move(suggestion));
  }
}

// Outputs that were computed again: what would have kept them.
void advise_on_misses(const Seen& seen, const Counts& node_free,
                      std::vector<std::pair<double, Suggestion>>& found) {
  if (seen.misses <= 0) return;
  Suggestion suggestion;
  suggestion.gain = formatted("up to %.0f outputs a step not computed again; their time is not measured",
                              seen.misses / seen.steps);
  const double free = static_cast<double>(node_free["ddr"]);
  if (seen.hbm_used > 0 && seen.hbm_used < kRoomy) {
    suggestion.finding = "outputs are computed again while HBM is left over";
    suggestion.policy = "[swapcore]\nmode = \"auto\"\nhbm_budget = \"auto\"\n";
  } else if (seen.ddr_used >= kNearlyAll && free > 0) {
    suggestion.finding =
        "outputs are computed again because the job's DDR is full; the node has " + bytes(free) + " left";
    suggestion.policy =
        "[ddr]\nbudget = " + written(static_cast<double>(seen.now.budget["ddr"]) + free) + "\n";
  } else if (seen.window_used >= kNearlyAll) {
    suggestion.finding = "outputs are computed again because the link is full: only more HBM would keep them";
  } else if (seen.window_used >= 0) {
    suggestion.finding = formatted(
        "outputs are computed again where that is cheaper than to move them: the plan fills %.0f%% of the "
        "link's windows",
        seen.window_used * 100);
    suggestion.gain = "none to be had by a policy";
  } else {
    suggestion.finding =
        "outputs are computed again, and nothing was moved: the job runs without a plan so far";
    suggestion.policy = "[swapcore]\nmode = \"auto\"\n";
  }
  found.emplace_back(0, std::move(suggestion));
}

void advise_on_the_rest(const Seen& seen, std::vector<std::pair<double, Suggestion>>& found) {
  if (seen.damaged > 0) {
    found.emplace_back(
        1, Suggestion{
               formatted("%.0f blocks came back from DDR damaged: the host's memory or the link is failing",
                         seen.damaged),
               "right numbers", "[swapcore]\nverify = \"always\"\n"});
  }
  if (seen.fallbacks > seen.steps) {
    found.emplace_back(
        0, Suggestion{
               formatted("%.0f times a step went another way than planned: terrace_fallbacks_total says why",
                         seen.fallbacks / seen.steps),
               "what the plan would have kept", ""});
  }
  const bool idle = seen.hits + seen.misses + seen.late == 0 && seen.to_ddr + seen.from_ddr == 0;
  if (idle && seen.hbm_used >= kNearlyAll) {
    found.emplace_back(0,
                       Suggestion{"HBM is full and no output is offered to Swap Core",
                                  "not known before outputs are offered", "[swapcore]\nmode = \"auto\"\n"});
  }
}

}  // namespace

Advice advise(const Watched& watched) {
  const Seen seen(watched);
  std::vector<std::pair<double, Suggestion>> found;  // with its share of a step
  advise_on_stalls(seen, found);
  advise_on_misses(seen, watched.node_free, found);
  advise_on_the_rest(seen, found);
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  Advice advice{.observed = observed(seen), .suggestions = {}};
  for (auto& [share, suggestion] : found) advice.suggestions.push_back(std::move(suggestion));
  return advice;
}

std::string advice_text(const Advice& advice) {
  std::string text = advice.observed + "\n";
  if (advice.suggestions.empty())
    text += "Nothing to gain: the job does not wait, and computes nothing again.\n";
  for (const Suggestion& suggestion : advice.suggestions) {
    text += "\n- " + suggestion.finding + "\n  gain: " + suggestion.gain + "\n";
    std::string_view policy = suggestion.policy;
    while (!policy.empty()) {
      const std::size_t end = policy.find('\n');
      text += "    " + std::string(policy.substr(0, end)) + "\n";
      policy.remove_prefix(std::min(end == std::string_view::npos ? policy.size() : end + 1, policy.size()));
    }
  }
  return text;
}

}  // namespace terrace
