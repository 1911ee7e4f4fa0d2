// Which rule decides about a site.
#include "swapcore/policy/policy.hpp"

namespace terrace {

const char* name_of(RuleAction action) {
  switch (action) {
    case RuleAction::kAuto:
      return "auto";
    case RuleAction::kHbm:
      return "hbm";
    case RuleAction::kDdr:
      return "ddr";
    case RuleAction::kDiscard:
      return "discard";
  }
  return "?";
}

bool glob_matches(std::string_view glob, std::string_view name) {
  // On a mismatch only the last star needs to take one more character: linear space, no recursion.
  std::size_t g = 0, n = 0;
  std::size_t star = std::string_view::npos, star_taken = 0;
  while (n < name.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      star_taken = n;
    } else if (g < glob.size() && glob[g] == name[n]) {
      ++g;
      ++n;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      n = ++star_taken;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

const Rule* deciding_rule(const std::vector<Rule>& rules, const SiteSpec& site, RulePhase phase,
                          std::uint64_t step) {
  const Rule* deciding = nullptr;
  for (const Rule& rule : rules) {
    if (deciding != nullptr && rule.priority <= deciding->priority) continue;
    if (rule.kind && *rule.kind != site.kind) continue;
    if (rule.phase != RulePhase::kAny && phase != RulePhase::kAny && rule.phase != phase) continue;
    if (step < rule.first_step || step > rule.last_step) continue;
    if (glob_matches(rule.match, site.name)) deciding = &rule;
  }
  return deciding;
}

RuleAction decide(const std::vector<Rule>& rules, const SiteSpec& site, RulePhase phase, std::uint64_t step) {
  const Rule* deciding = deciding_rule(rules, site, phase, step);
  return deciding == nullptr ? RuleAction::kAuto : deciding->action;
}

}  // namespace terrace
