#include "swapcore/policy/rule_report.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "swapcore/policy/value_words.hpp"

namespace terrace {
namespace {

constexpr std::size_t kNearMost = 3;

bool matches(const Rule& rule, const SiteSpec& site) {
  return (!rule.kind || *rule.kind == site.kind) && glob_matches(rule.match, site.name);
}

std::string place_of(const Policy& policy, const Rule& rule) {
  const std::string file = policy.source.empty() ? "policy" : policy.source;
  if (!rule.position) return file;
  return file + ":" + std::to_string(rule.position->line) + ":" + std::to_string(rule.position->column);
}

// The fewest changes of the pattern after which it matches the name; a star stands for any run at no cost.
std::size_t distance(std::string_view glob, std::string_view name) {
  std::vector<std::size_t> row(name.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (const char c : glob) {
    std::size_t diagonal = row[0];
    if (c != '*') ++row[0];
    for (std::size_t j = 0; j < name.size(); ++j) {
      const std::size_t above = row[j + 1];
      row[j + 1] = c == '*' ? std::min(above, row[j])
                            : std::min({diagonal + (c == name[j] ? 0 : 1), above + 1, row[j] + 1});
      diagonal = above;
    }
  }
  return row.back();
}

// The name with one # for each part that begins with a number: those tell layers apart.
std::string shape_of(std::string_view name) {
  std::string shape;
  for (const char c : name) {
    const bool digit = c >= '0' && c <= '9';
    const bool numbered = digit && (shape.empty() || shape.back() == '.' || shape.back() == '#');
    if (!numbered) shape += c;
    if (numbered && (shape.empty() || shape.back() != '#')) shape += '#';
  }
  return shape;
}

std::string listed_sites(const std::vector<const SiteSpec*>& sites) {
  std::string text;
  std::set<std::string> shapes;
  for (const SiteSpec* site : sites) {
    if (shapes.size() == kNearMost) break;
    if (!shapes.insert(shape_of(site->name)).second) continue;
    text += (text.empty() ? "" : ", ") + site->name + " (" + name_of(site->kind) + ")";
  }
  return text;
}

// The sites whose names the rule would match but for its kind; else those whose names are nearest.
std::string near_misses(const Rule& rule, const std::vector<SiteSpec>& sites) {
  std::vector<std::pair<std::size_t, const SiteSpec*>> ranked;
  ranked.reserve(sites.size());
  for (const SiteSpec& site : sites) ranked.emplace_back(distance(rule.match, site.name), &site);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  const bool by_kind = ranked.front().first == 0;
  std::vector<const SiteSpec*> near;
  for (const auto& [far, site] : ranked) {
    if (!by_kind || far == 0) near.push_back(site);
  }
  return (by_kind ? "; of another kind: " : "; the nearest: ") + listed_sites(near);
}

std::optional<Error> first_conflict(const Policy& policy, const std::vector<SiteSpec>& sites) {
  for (const SiteSpec& site : sites) {
    std::vector<const Rule*> here;
    for (const Rule& rule : policy.swapcore.rules) {
      if (!matches(rule, site)) continue;
      for (const Rule* other : here) {
        if (!contradict(*other, rule)) continue;
        return Error{Errc::kInvalidArgument,
                     place_of(policy, rule) + ": swapcore.rule: " + in_quotes(rule.match) + " says " +
                         name_of(rule.action) + " of " + site.name + ", and the rule at " +
                         place_of(policy, *other) + ", " + in_quotes(other->match) + ", says " +
                         name_of(other->action) + " at the same priority " + std::to_string(rule.priority) +
                         "; give one of them another priority",
                     {},
                     {}};
      }
      here.push_back(&rule);
    }
  }
  return std::nullopt;
}

}  // namespace

bool contradict(const Rule& a, const Rule& b) {
  if (a.priority != b.priority || a.action == b.action) return false;
  if (a.kind && b.kind && *a.kind != *b.kind) return false;
  if (a.phase != RulePhase::kAny && b.phase != RulePhase::kAny && a.phase != b.phase) return false;
  return a.first_step <= b.last_step && b.first_step <= a.last_step;
}

RuleReport report_rules(const Policy& policy, const std::vector<SiteSpec>& sites) {
  RuleReport report;
  report.conflict = first_conflict(policy, sites);
  for (const Rule& rule : policy.swapcore.rules) {
    if (std::any_of(sites.begin(), sites.end(), [&](const SiteSpec& site) { return matches(rule, site); }))
      continue;
    std::string what = in_quotes(rule.match);
    if (rule.kind) what += std::string(" of kind ") + name_of(*rule.kind);
    report.warnings.push_back(place_of(policy, rule) + ": warning: swapcore.rule.match: " + what +
                              " matches no site of this model" +
                              (sites.empty() ? ", which has none" : near_misses(rule, sites)));
  }
  return report;
}

}  // namespace terrace
