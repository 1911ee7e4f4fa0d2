#include "daemon/explanation.hpp"

#include <algorithm>
#include <set>
#include <string_view>

namespace terrace {
namespace {

// One rule, or none, decides from the first of these steps to the last.
struct Span {
  std::uint64_t first, last;
  const Rule* rule;
  bool operator==(const Span&) const = default;
};

std::vector<Span> spans_of(const std::vector<Rule>& rules, const SiteSpec& site, RulePhase phase) {
  std::set<std::uint64_t> starts{0};
  for (const Rule& rule : rules) {
    starts.insert(rule.first_step);
    if (rule.last_step != UINT64_MAX) starts.insert(rule.last_step + 1);
  }
  std::vector<Span> spans;
  for (const std::uint64_t start : starts) {
    const Rule* rule = deciding_rule(rules, site, phase, start);
    if (!spans.empty() && spans.back().rule == rule) continue;
    if (!spans.empty()) spans.back().last = start - 1;
    spans.push_back({start, UINT64_MAX, rule});
  }
  return spans;
}

std::string padded(std::string text, std::size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

std::string verdict(const Policy& policy, const Rule* rule) {
  if (policy.swapcore.mode == SwapMode::kOff) return "off";
  if (rule == nullptr) return policy.swapcore.mode == SwapMode::kRules ? "discard  no rule" : "auto";
  std::string text = padded(name_of(rule->action), 7) + "  ";
  if (rule->position) {
    text +=
        "at " + std::to_string(rule->position->line) + ":" + std::to_string(rule->position->column) + ", ";
  }
  return text + rule->match;
}

std::string when(std::string_view phase, const Span& span) {
  std::string text(phase);
  if (span.first == 0 && span.last == UINT64_MAX) return text;
  return text + (text.empty() ? "" : ", ") + "steps " + std::to_string(span.first) + " to " +
         (span.last == UINT64_MAX ? "the end" : std::to_string(span.last));
}

}  // namespace

std::string explanation(const Policy& policy, const std::vector<SiteSpec>& sites) {
  std::size_t longest = 0;
  for (const SiteSpec& site : sites) longest = std::max(longest, site.name.size());
  std::string text;
  for (const SiteSpec& site : sites) {
    const std::string name = padded(site.name, longest) + "  " + padded(name_of(site.kind), 9) + "  ";
    const auto add = [&](const std::vector<Span>& spans, std::string_view phase) {
      for (const Span& span : spans) {
        const std::string limits = when(phase, span);
        text += name + verdict(policy, span.rule) + (limits.empty() ? "" : ": " + limits) + "\n";
      }
    };
    const auto forward = spans_of(policy.swapcore.rules, site, RulePhase::kForward);
    const auto recompute = spans_of(policy.swapcore.rules, site, RulePhase::kRecompute);
    if (forward == recompute) {
      add(forward, "");
    } else {
      add(forward, "forward");
      add(recompute, "recompute");
    }
  }
  return text;
}

}  // namespace terrace
