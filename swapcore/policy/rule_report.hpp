// What is wrong with rules once the sites of a model are known.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "swapcore/policy/policy.hpp"

namespace terrace {

// Whether two rules of equal priority can decide of one site, phase and step, and differ. Their patterns are
// not compared.
[[nodiscard]] bool contradict(const Rule& a, const Rule& b);

struct RuleReport {
  // Rules that match no site, one line each: "p.toml:7:9: warning: swapcore.rule.match: ..., near ...".
  std::vector<std::string> warnings;
  // The first two rules that contradict each other on a site: kInvalidArgument; the text has both positions.
  std::optional<Error> conflict;
};
[[nodiscard]] RuleReport report_rules(const Policy& policy, const std::vector<SiteSpec>& sites);

}  // namespace terrace
