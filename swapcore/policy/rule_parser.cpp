#include "swapcore/policy/rule_parser.hpp"

#include <charconv>

#include "swapcore/policy/value_words.hpp"

namespace terrace {
namespace {

constexpr std::string_view kSection = "swapcore.rule";
constexpr std::size_t kGlobMost = 256;

constexpr Word<std::optional<SiteKind>> kKinds[] = {{"any", std::nullopt},
                                                    {"matmul", SiteKind::kMatmul},
                                                    {"gmm", SiteKind::kGmm},
                                                    {"attention", SiteKind::kAttention},
                                                    {"scan", SiteKind::kScan}};
constexpr Word<RulePhase> kPhases[] = {
    {"any", RulePhase::kAny}, {"forward", RulePhase::kForward}, {"recompute", RulePhase::kRecompute}};
constexpr Word<RuleAction> kActions[] = {{"auto", RuleAction::kAuto},
                                         {"hbm", RuleAction::kHbm},
                                         {"ddr", RuleAction::kDdr},
                                         {"discard", RuleAction::kDiscard}};

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == '.' || c == '/' || c == ':';
}

struct Steps {
  std::uint64_t first = 0, last = UINT64_MAX;
};

std::optional<std::uint64_t> whole_number(std::string_view text) {
  std::uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (text.empty() || parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return value;
}

// "0..100", or "100.." without an end.
std::optional<Steps> parse_steps(std::string_view text) {
  const std::size_t dots = text.find("..");
  if (dots == std::string_view::npos) return std::nullopt;
  const auto first = whole_number(text.substr(0, dots));
  const std::string_view rest = text.substr(dots + 2);
  const auto last = rest.empty() ? std::optional<std::uint64_t>(UINT64_MAX) : whole_number(rest);
  if (!first || !last) return std::nullopt;
  return Steps{*first, *last};
}

PlacedRule parse_rule(const toml::table& table, Problems& problems) {
  const Position here = position_of(table.source());
  const SectionReader reader(table, kSection, problems);
  PlacedRule placed{{}, here, here};
  Rule& rule = placed.rule;

  const auto match = reader.text("match", "");
  rule.match = match.value;
  rule.position = match.position.value_or(here);
  if (reader.node("match") == nullptr) {
    reader.problem(here, "match", "is missing; say which sites, as match = \"layer.*.moe.fc1\"");
  } else if (match.position) {
    if (const auto fault = glob_fault(match.value))
      reader.problem(*match.position, "match", in_quotes(match.value) + " " + *fault);
  }
  rule.kind = reader.word<std::optional<SiteKind>>("kind", std::nullopt, kKinds).value;
  rule.phase = reader.word<RulePhase>("phase", RulePhase::kAny, kPhases).value;
  const auto action = reader.word<RuleAction>("action", RuleAction::kAuto, kActions);
  rule.action = action.value;
  placed.action = action.position.value_or(here);
  if (reader.node("action") == nullptr)
    reader.problem(here, "action", "is missing; use auto, hbm, ddr or discard");
  rule.priority = static_cast<int>(reader.integer("priority", 0, {-1000000, 1000000}).value);

  const auto steps = reader.text("steps", "0..");
  const auto range = parse_steps(steps.value);
  if (steps.position && !range) {
    reader.problem(
        *steps.position, "steps",
        in_quotes(steps.value) + " is not a range of steps; use \"0..100\", or \"100..\" without an end");
  } else if (steps.position && range->first > range->last) {
    reader.problem(*steps.position, "steps",
                   in_quotes(steps.value) + " ends before it begins; put the smaller step first");
  }
  if (range) {
    rule.first_step = range->first;
    rule.last_step = range->last;
  }
  return placed;
}

}  // namespace

std::optional<std::string> glob_fault(std::string_view glob) {
  if (glob.empty()) return "is empty; use \"*\" for all";
  if (glob.size() > kGlobMost)
    return "is longer than " + std::to_string(kGlobMost) + " characters; shorten it";
  if (glob.find("**") != std::string_view::npos) return "has two stars in a row; one * crosses dots already";
  if (glob.front() == '.' || glob.back() == '.' || glob.find("..") != std::string_view::npos)
    return "has an empty part; put names or * between the dots";
  for (const char c : glob) {
    if (c == '*' || is_name_character(c)) continue;
    const std::string what =
        static_cast<unsigned char>(c) < 0x80 ? in_quotes({&c, 1}) : "characters beyond ASCII";
    return "can't hold " + what + "; a pattern is letters, digits, _ - . / : and *";
  }
  return std::nullopt;
}

std::vector<PlacedRule> parse_rules(const toml::node& node, Problems& problems) {
  constexpr std::string_view kForm = "write each rule under a [[swapcore.rule]] line of its own";
  std::vector<PlacedRule> rules;
  const auto* array = node.as_array();
  if (array == nullptr) {
    problems.add(position_of(node.source()), kSection, "is not a list of rules; " + std::string(kForm));
    return rules;
  }
  for (const toml::node& element : *array) {
    if (const auto* table = element.as_table()) {
      rules.push_back(parse_rule(*table, problems));
    } else {
      problems.add(position_of(element.source()), kSection, "holds what is no rule; " + std::string(kForm));
    }
  }
  return rules;
}

}  // namespace terrace
