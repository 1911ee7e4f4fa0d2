// Rules against the sites of a model: what matches nothing, and what contradicts.
#include "swapcore/policy/rule_report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using testing::HasSubstr;
using testing::Not;

std::vector<SiteSpec> sites() {
  std::vector<SiteSpec> all;
  for (int layer = 0; layer < 12; ++layer) {
    const std::string name = "layer." + std::to_string(layer);
    all.push_back({name + ".kda.q", SiteKind::kMatmul, layer, "kda.q"});
    all.push_back({name + ".kda.out", SiteKind::kMatmul, layer, "kda.out"});
    all.push_back({name + ".moe.fc1", SiteKind::kGmm, layer, "moe.fc1"});
    all.push_back({name + ".moe.fc2", SiteKind::kGmm, layer, "moe.fc2"});
  }
  return all;
}

RuleReport report(const std::string& rules) {
  const auto policy = parse_policy(rules, "p.toml");
  EXPECT_TRUE(policy.ok()) << (policy ? "" : policy.error().text);
  return policy ? report_rules(*policy, sites()) : RuleReport{};
}

struct Text {
  std::string match, action, more;
};
std::string rule(const Text& text) {
  return "[[swapcore.rule]]\nmatch = \"" + text.match + "\"\naction = \"" + text.action + "\"\n" + text.more +
         "\n";
}

TEST(RuleReport, RulesThatMatchAndAgreeAreFine) {
  const RuleReport fine = report(rule({"layer.*.moe.fc1", "ddr", ""}) + rule({"layer.3.*", "ddr", ""}) +
                                 rule({"*", "auto", "priority = -1"}));
  EXPECT_TRUE(fine.warnings.empty());
  EXPECT_FALSE(fine.conflict.has_value());
}

TEST(RuleReport, NearMissesAreNamedNearestFirst) {
  const RuleReport near = report(rule({"layer.*.moe.fc3", "ddr", ""}) + rule({"layer.12.kda.q", "ddr", ""}));
  ASSERT_EQ(near.warnings.size(), 2u);
  EXPECT_THAT(near.warnings[0],
              HasSubstr("p.toml:2:9: warning: swapcore.rule.match: \"layer.*.moe.fc3\" matches no site"));
  EXPECT_THAT(near.warnings[0], HasSubstr("; the nearest: layer.0.moe.fc1 (gmm), layer.0.moe.fc2 (gmm)"));
  EXPECT_THAT(near.warnings[1], HasSubstr("p.toml:6:9: "));
  EXPECT_THAT(near.warnings[1], HasSubstr("; the nearest: layer.1.kda.q (matmul), "));
}

TEST(RuleReport, ANameOfAnotherKindIsANearMiss) {
  const RuleReport kind = report(rule({"layer.*.kda.*", "ddr", "kind = \"scan\""}));
  ASSERT_EQ(kind.warnings.size(), 1u);
  EXPECT_THAT(kind.warnings[0], HasSubstr("of kind scan matches no site"));
  EXPECT_THAT(kind.warnings[0],
              HasSubstr("; of another kind: layer.0.kda.q (matmul), layer.0.kda.out (matmul)"));
  EXPECT_THAT(kind.warnings[0], Not(HasSubstr("moe")));
}

TEST(RuleReport, RulesMeetOnASiteOnly) {
  const std::string layer = rule({"layer.3.*", "hbm", ""});
  const RuleReport meet = report(layer + rule({"*.moe.fc1", "ddr", ""}));
  ASSERT_TRUE(meet.conflict.has_value());
  EXPECT_EQ(meet.conflict->code, Errc::kInvalidArgument);
  EXPECT_EQ(
      meet.conflict->text,
      "p.toml:6:9: swapcore.rule: \"*.moe.fc1\" says ddr of layer.3.moe.fc1, and the rule at p.toml:2:9, "
      "\"layer.3.*\", says hbm at the same priority 0; give one of them another priority");
  EXPECT_FALSE(report(rule({"layer.3.kda.*", "hbm", ""}) + rule({"*.moe.fc1", "ddr", ""})).conflict);
  EXPECT_FALSE(report(layer + rule({"*.moe.fc1", "ddr", "priority = 1"})).conflict);
}

TEST(RuleReport, RulesThatNeverMeetInKindPhaseOrStepsMayDiffer) {
  const auto conflict = [](const std::string& a, const std::string& b) {
    return report(rule({"layer.3.*", "hbm", a}) + rule({"*.moe.fc1", "ddr", b})).conflict.has_value();
  };
  EXPECT_TRUE(conflict("kind = \"gmm\"", ""));
  EXPECT_FALSE(conflict("kind = \"matmul\"", "kind = \"gmm\""));
  EXPECT_TRUE(conflict("phase = \"forward\"", ""));
  EXPECT_FALSE(conflict("phase = \"forward\"", "phase = \"recompute\""));
  EXPECT_TRUE(conflict("steps = \"0..5\"", "steps = \"5..9\""));
  EXPECT_FALSE(conflict("steps = \"0..4\"", "steps = \"5..\""));
}

TEST(RuleReport, AModelWithoutSitesIsSaidSo) {
  const auto policy = parse_policy(rule({"*", "ddr", ""}), "p.toml");
  ASSERT_TRUE(policy.ok());
  const RuleReport none = report_rules(*policy, {});
  ASSERT_EQ(none.warnings.size(), 1u);
  EXPECT_THAT(none.warnings[0], HasSubstr("which has none"));
}

}  // namespace
}  // namespace terrace
