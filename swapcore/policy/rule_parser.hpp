// [[swapcore.rule]]: internal to the policy parser.
#pragma once

#include <vector>

#include "swapcore/policy/section_reader.hpp"

namespace terrace {

struct PlacedRule {
  Rule rule;
  Position position;  // of the rule's header
  Position action;    // of its action
};

// What is wrong with a pattern of names, or nothing.
[[nodiscard]] std::optional<std::string> glob_fault(std::string_view glob);

// Reads the value of swapcore.rule. What is wrong goes to `problems`.
[[nodiscard]] std::vector<PlacedRule> parse_rules(const toml::node& node, Problems& problems);

}  // namespace terrace
