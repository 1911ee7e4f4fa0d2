// Values that are each well-formed and can't be meant together.
#include "swapcore/policy/contradictions.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace terrace {
namespace {

using testing::HasSubstr;

// Every amount and the mode are written in the file, each on its own line.
PolicyPositions all_written() {
  PolicyPositions at;
  at.hbm_budget = Position{1, 10};
  at.hbm_reserve = Position{2, 10};
  at.ddr_budget = Position{3, 10};
  at.swapcore_mode = Position{4, 10};
  at.swapcore_hbm_budget = Position{5, 10};
  at.swapcore_ddr_budget = Position{6, 10};
  at.checkpoint_budget = Position{7, 10};
  return at;
}

std::string found(const Policy& policy, const PolicyPositions& at = all_written(),
                  const std::vector<PlacedRule>& rules = {}) {
  Problems problems;
  find_contradictions(policy, at, rules, problems);
  return problems.empty() ? "" : problems.first("p").text;
}

Policy with_budgets(Amount hbm, Amount ddr) {
  Policy policy;
  policy.hbm.budget = hbm;
  policy.hbm.reserve = Amount::of(1_MiB);
  policy.ddr.budget = ddr;
  return policy;
}

TEST(Contradictions, DefaultsHoldNone) { EXPECT_EQ(found(Policy{}, {}), ""); }

TEST(Contradictions, PartsFitTheirWhole) {
  Policy policy = with_budgets(Amount::of(8_GiB), Amount::of(4_GiB));
  policy.swapcore.hbm_budget = Amount::of(8_GiB);
  policy.swapcore.ddr_budget = Amount::of(4_GiB);
  policy.checkpoint.budget = Amount::of(8_GiB);
  EXPECT_EQ(found(policy), "");
  policy.checkpoint.budget = Amount::of(9_GiB);
  EXPECT_THAT(found(policy), HasSubstr("p:7:10: checkpoint.budget: \"9.0 GiB\" contradicts hbm.budget"));
  policy.swapcore.ddr_budget = Amount::of(5_GiB);
  EXPECT_THAT(found(policy), HasSubstr("p:6:10: swapcore.ddr_budget: "));
  policy.swapcore.hbm_budget = Amount::of(9_GiB);
  EXPECT_THAT(found(policy), HasSubstr("p:5:10: swapcore.hbm_budget: "));
}

TEST(Contradictions, AmountsOfDifferentFormsWaitForTheDevice) {
  Policy policy = with_budgets(Amount::of(8_GiB), Amount{});
  policy.swapcore.hbm_budget = Amount::of_share(0.99);
  policy.swapcore.ddr_budget = Amount::of(9000_GiB);
  policy.checkpoint.budget = Amount{};
  EXPECT_EQ(found(policy), "");
}

TEST(Contradictions, WhereOnlyTheWholeIsWrittenTheErrorIsThere) {
  Policy policy = with_budgets(Amount::of_share(0.5), Amount{});
  policy.swapcore.hbm_budget = Amount::of_share(0.6);
  PolicyPositions at;
  at.hbm_budget = Position{9, 3};
  EXPECT_THAT(found(policy, at), HasSubstr("p:9:3: hbm.budget: "));
}

TEST(Contradictions, AReserveLeavesSomething) {
  Policy policy = with_budgets(Amount::of(1_GiB), Amount{});
  policy.hbm.reserve = Amount::of(1_GiB);
  EXPECT_THAT(found(policy), HasSubstr("p:2:10: hbm.reserve: "));
  policy.hbm.reserve = Amount::of(1023_MiB);
  EXPECT_EQ(found(policy), "");
  policy.hbm.reserve = Amount::of_share(1);
  EXPECT_THAT(found(policy), HasSubstr("leaves nothing to use"));
  policy = with_budgets(Amount::of_share(0.9), Amount{});
  policy.hbm.reserve = Amount::of_share(0.1);
  EXPECT_EQ(found(policy), "") << "together exactly the device";
  policy.hbm.reserve = Amount::of_share(0.11);
  EXPECT_THAT(found(policy), HasSubstr("together more than the device"));
}

TEST(Contradictions, TheDefaultReserveYieldsToASmallBudget) {
  Policy policy;
  policy.hbm.budget = Amount::of(64_MiB);
  PolicyPositions at;
  at.hbm_budget = Position{2, 10};
  EXPECT_EQ(found(policy, at), "");
}

TEST(Contradictions, RulesOfOnePatternAgreeOrNeverMeet) {
  PlacedRule hbm{{}, {10, 1}, {12, 10}}, ddr{{}, {20, 1}, {22, 10}};
  hbm.rule.match = ddr.rule.match = "layer.*";
  hbm.rule.action = RuleAction::kHbm;
  ddr.rule.action = RuleAction::kDdr;
  EXPECT_EQ(found(Policy{}, {}, {hbm, hbm}), "");
  EXPECT_THAT(found(Policy{}, {}, {hbm, ddr}),
              HasSubstr("p:22:10: swapcore.rule.action: contradicts the rule at line 10"));
  for (const auto& change : std::vector<std::function<void(Rule&)>>{
           [](Rule& r) { r.priority = 1; }, [](Rule& r) { r.match = "layer.1"; },
           [](Rule& r) { r.kind = SiteKind::kScan; }, [](Rule& r) { r.phase = RulePhase::kRecompute; },
           [](Rule& r) { r.first_step = 9; }}) {
    PlacedRule narrow = hbm, other = ddr;
    narrow.rule.kind = SiteKind::kGmm;
    narrow.rule.phase = RulePhase::kForward;
    narrow.rule.last_step = 8;
    EXPECT_NE(found(Policy{}, {}, {narrow, other}), "") << "any kind, phase and step include these";
    EXPECT_NE(found(Policy{}, {}, {other, narrow}), "");
    change(other.rule);
    EXPECT_EQ(found(Policy{}, {}, {narrow, other}), "");
    EXPECT_EQ(found(Policy{}, {}, {other, narrow}), "");
  }
}

TEST(Contradictions, ModeAndRulesGoTogether) {
  Policy policy;
  PlacedRule rule{{}, {10, 1}, {12, 10}};
  rule.rule.match = "*";
  policy.swapcore.mode = SwapMode::kOff;
  EXPECT_THAT(found(policy, all_written(), {rule}),
              HasSubstr("p:10:1: swapcore.rule: contradicts swapcore.mode"));
  EXPECT_EQ(found(policy), "");
  policy.swapcore.mode = SwapMode::kRules;
  EXPECT_EQ(found(policy, all_written(), {rule}), "");
  EXPECT_THAT(found(policy), HasSubstr("p:4:10: swapcore.mode: \"rules\" has no rule"));
}

}  // namespace
}  // namespace terrace
