#include "swapcore/policy/contradictions.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "swapcore/policy/rule_report.hpp"

namespace terrace {
namespace {

std::string written(const Amount& amount) {
  switch (amount.form) {
    case Amount::Form::kAuto:
      return "\"auto\"";
    case Amount::Form::kBytes:
      return "\"" + format_bytes(amount.bytes) + "\"";
    case Amount::Form::kShare:
      break;
  }
  std::string percent = std::to_string(amount.share * 100);
  percent.erase(percent.find_last_not_of('0') + 1);
  if (percent.back() == '.') percent.pop_back();
  return "\"" + percent + "%\"";
}

bool is_zero(const Amount& amount) {
  return (amount.form == Amount::Form::kBytes && amount.bytes == Bytes(0)) ||
         (amount.form == Amount::Form::kShare && amount.share == 0);
}

// Only amounts of one form compare before the device is known.
bool surely_larger(const Amount& a, const Amount& b) {
  if (a.form != b.form) return false;
  if (a.form == Amount::Form::kBytes) return a.bytes > b.bytes;
  return a.form == Amount::Form::kShare && a.share > b.share;
}

struct Named {
  std::string_view key;
  const Amount& amount;
  std::optional<Position> position;
};

// `part` is taken from `whole`. The error goes to the part, or where only the whole is written, there.
void require_within(const Named& part, const Named& whole, Problems& problems) {
  if (!surely_larger(part.amount, whole.amount)) return;
  const auto position = part.position ? part.position : whole.position;
  if (!position) return;
  const Named& at = part.position ? part : whole;
  const Named& other = part.position ? whole : part;
  problems.add(*position, at.key,
               written(at.amount) + " contradicts " + std::string(other.key) + " = " + written(other.amount) +
                   "; " + std::string(part.key) + " is taken from " + std::string(whole.key) +
                   " and can be at most as large");
}

void check_hbm(const Policy& policy, const PolicyPositions& at, Problems& problems) {
  const Amount& budget = policy.hbm.budget;
  const Amount& reserve = policy.hbm.reserve;
  if (at.hbm_budget && is_zero(budget))
    problems.add(
        *at.hbm_budget, "hbm.budget",
        written(budget) + " leaves no device memory; use a size like \"24GiB\" or a share like \"90%\"");
  if (!at.hbm_reserve) return;  // the default reserve yields to a small budget
  if (reserve.form == Amount::Form::kShare && reserve.share >= 1) {
    problems.add(*at.hbm_reserve, "hbm.reserve",
                 "\"100%\" leaves nothing to use; a reserve is small, as \"2GiB\" or \"3%\"");
  } else if (budget.form == reserve.form && budget.form == Amount::Form::kBytes &&
             reserve.bytes >= budget.bytes) {
    problems.add(*at.hbm_reserve, "hbm.reserve",
                 written(reserve) + " is no less than hbm.budget = " + written(budget) +
                     "; use a reserve smaller than the budget, or leave it out");
  } else if (at.hbm_budget && budget.form == Amount::Form::kShare && reserve.form == Amount::Form::kShare &&
             budget.share + reserve.share > 1 + 1e-9) {
    problems.add(*at.hbm_reserve, "hbm.reserve",
                 written(reserve) + " and hbm.budget = " + written(budget) +
                     " are together more than the device; use shares that add up to \"100%\" or less");
  }
}

void check_rules(const Policy& policy, const PolicyPositions& at, const std::vector<PlacedRule>& rules,
                 Problems& problems) {
  if (policy.swapcore.mode == SwapMode::kOff && !rules.empty())
    problems.add(rules.front().position, "swapcore.rule",
                 "contradicts swapcore.mode = \"off\"; use mode \"rules\" or \"auto\", or remove the rules");
  if (policy.swapcore.mode == SwapMode::kRules && rules.empty() && at.swapcore_mode)
    problems.add(*at.swapcore_mode, "swapcore.mode",
                 "\"rules\" has no rule to follow; add a [[swapcore.rule]], or use \"auto\" or \"off\"");
  // Of other patterns only a model's sites can tell whether they meet.
  std::map<std::pair<std::string_view, int>, std::vector<const PlacedRule*>> alike;
  for (const PlacedRule& placed : rules) {
    auto& others = alike[{placed.rule.match, placed.rule.priority}];
    const auto first = std::find_if(others.begin(), others.end(), [&placed](const PlacedRule* other) {
      return contradict(other->rule, placed.rule);
    });
    if (first != others.end()) {
      problems.add(
          placed.action, "swapcore.rule.action",
          "contradicts the rule at line " + std::to_string((*first)->position.line) +
              ", which says otherwise of the same sites; give one of them another priority, or remove it");
    }
    others.push_back(&placed);
  }
}

}  // namespace

void find_contradictions(const Policy& policy, const PolicyPositions& at,
                         const std::vector<PlacedRule>& rules, Problems& problems) {
  check_hbm(policy, at, problems);
  const Named hbm{"hbm.budget", policy.hbm.budget, at.hbm_budget};
  const Named ddr{"ddr.budget", policy.ddr.budget, at.ddr_budget};
  require_within({"swapcore.hbm_budget", policy.swapcore.hbm_budget, at.swapcore_hbm_budget}, hbm, problems);
  require_within({"swapcore.ddr_budget", policy.swapcore.ddr_budget, at.swapcore_ddr_budget}, ddr, problems);
  require_within({"checkpoint.budget", policy.checkpoint.budget, at.checkpoint_budget}, hbm, problems);
  check_rules(policy, at, rules, problems);
}

}  // namespace terrace
