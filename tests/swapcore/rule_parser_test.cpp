// [[swapcore.rule]] from TOML.
#include "swapcore/policy/rule_parser.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using testing::HasSubstr;

struct Parsed {
  std::vector<PlacedRule> rules;
  std::string problem;
};
Parsed parse(const std::string& text) {
  const toml::parse_result document = toml::parse(text);
  EXPECT_TRUE(document) << text;
  const toml::node* node = document ? document.table().get("rule") : nullptr;
  if (node == nullptr) return {};
  Problems problems;
  Parsed parsed{parse_rules(*node, problems), ""};
  if (!problems.empty()) parsed.problem = problems.first("p").text;
  return parsed;
}
Parsed one_rule(const std::string& lines) {
  return parse("[[rule]]\nmatch = \"*\"\naction = \"hbm\"\n" + lines);
}

TEST(RuleParser, PositionsAreThoseOfHeaderAndAction) {
  const Parsed parsed =
      parse("\n[[rule]]\nmatch = \"a\"\n  action = \"ddr\"\n[[rule]]\naction=\"hbm\"\nmatch=\"b\"\n");
  EXPECT_EQ(parsed.problem, "");
  ASSERT_EQ(parsed.rules.size(), 2u);
  EXPECT_EQ(parsed.rules[0].position, (Position{2, 1}));
  EXPECT_EQ(parsed.rules[0].action, (Position{4, 12}));
  EXPECT_EQ(parsed.rules[1].position, (Position{5, 1}));
  EXPECT_EQ(parsed.rules[1].rule.match, "b");
}

TEST(RuleParser, StepsAreInclusiveAndMayBeOpen) {
  const Rule both = one_rule("steps = \"3..7\"").rules.at(0).rule;
  EXPECT_EQ(both.first_step, 3u);
  EXPECT_EQ(both.last_step, 7u);
  const Rule open = one_rule("steps = \"3..\"").rules.at(0).rule;
  EXPECT_EQ(open.first_step, 3u);
  EXPECT_EQ(open.last_step, UINT64_MAX);
  EXPECT_EQ(one_rule("steps = \"5..5\"").problem, "");
  for (const char* bad : {"", "..", "..7", "3", "3.7", "3...7", "a..b", "-1..2", "3..7..9", " 3..7",
                          "99999999999999999999..", "1..99999999999999999999"})
    EXPECT_THAT(one_rule("steps = \"" + std::string(bad) + "\"").problem,
                HasSubstr("is not a range of steps"))
        << bad;
}

TEST(RuleParser, PatternsAreNamesAndStars) {
  for (const char* good : {"*", "layer.*.moe.fc1", "model/layers:3.q_proj-x", "*fc*", "*.fc1"})
    EXPECT_EQ(parse("[[rule]]\naction = \"hbm\"\nmatch = \"" + std::string(good) + "\"").problem, "") << good;
  for (const char* bad : {"", "a..b", ".a", "a.", "a**b", "a b", "a?b", "[ab]", "\u00e9", "a\\\\b"})
    EXPECT_THAT(parse("[[rule]]\naction = \"hbm\"\nmatch = \"" + std::string(bad) + "\"").problem,
                HasSubstr("p:3:9: swapcore.rule.match: "))
        << bad;
  const std::string longest(256, 'a');
  EXPECT_EQ(parse("[[rule]]\naction = \"hbm\"\nmatch = \"" + longest + "\"").problem, "");
  EXPECT_THAT(parse("[[rule]]\naction = \"hbm\"\nmatch = \"" + longest + "a\"").problem,
              HasSubstr("is longer"));
}

TEST(RuleParser, WhatIsNoListOfRulesIsRefused) {
  EXPECT_THAT(parse("[rule]\nmatch = \"*\"").problem,
              HasSubstr("p:1:1: swapcore.rule: is not a list of rules"));
  EXPECT_THAT(parse("rule = [1]").problem, HasSubstr("p:1:9: swapcore.rule: holds what is no rule"));
  EXPECT_TRUE(parse("rule = []").rules.empty());
  EXPECT_EQ(parse("rule = [{ match = \"*\", action = \"hbm\" }]").rules.size(), 1u);
}

}  // namespace
}  // namespace terrace
