// Amounts, patterns and rules; the words of errors.
#include "swapcore/policy/policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "swapcore/policy/value_words.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

Amount amount(std::string_view text) {
  const auto parsed = parse_amount(text);
  EXPECT_TRUE(parsed.ok()) << text << ": " << (parsed ? "" : parsed.error().text);
  return parsed ? *parsed : Amount{};
}

std::string amount_error(std::string_view text) {
  const auto parsed = parse_amount(text);
  EXPECT_FALSE(parsed.ok()) << text;
  if (parsed) return "";
  EXPECT_EQ(parsed.error().code, Errc::kInvalidArgument);
  return parsed.error().text;
}

TEST(Amount, TakesSizesSharesAndAuto) {
  EXPECT_EQ(amount("24GiB"), Amount::of(24_GiB));
  EXPECT_EQ(amount("512 MiB"), Amount::of(512_MiB));
  EXPECT_EQ(amount("  1.5KiB "), Amount::of(1536_B));
  EXPECT_EQ(amount("17B"), Amount::of(17_B));
  EXPECT_EQ(amount("2TiB"), Amount::of(2048_GiB));
  EXPECT_EQ(amount("0"), Amount::of(0_B));
  EXPECT_EQ(amount("80%"), Amount::of_share(0.8));
  EXPECT_EQ(amount("12.5%"), Amount::of_share(0.125));
  EXPECT_EQ(amount("100%"), Amount::of_share(1));
  EXPECT_EQ(amount("auto"), Amount{});
}

TEST(Amount, WholeSizesAreExactBeyondADouble) {
  EXPECT_EQ(amount("9007199254740993B"), Amount::of(Bytes(9007199254740993)));
  EXPECT_EQ(Amount::of_share(1).resolve(Bytes(9007199254740993), 0_B), Bytes(9007199254740993));
}

TEST(Amount, RefusesWhatIsNoAmountAndSaysWhatIs) {
  for (const char* text : {"",
                           " ",
                           "24",
                           "24GB",
                           "24gib",
                           "GiB",
                           "-1GiB",
                           "-0",
                           "-1%",
                           "100.1%",
                           "1..5GiB",
                           ".5GiB",
                           "5.GiB",
                           "inf",
                           "nan%",
                           "1e9B",
                           "0x10B",
                           "automatic",
                           "1GiB2",
                           "99999999999TiB",
                           "99999999999999999999999B",
                           "%",
                           "1 2GiB"}) {
    EXPECT_THAT(amount_error(text), HasSubstr("use a size like \"24GiB\"")) << text;
    EXPECT_THAT(amount_error(text), HasSubstr("auto")) << text;
  }
  EXPECT_THAT(amount_error(std::string(500, '9') + "B"), HasSubstr("more than any machine holds"));
  EXPECT_THAT(amount_error("1\nGiB"), HasSubstr("\\x0a")) << "one line, whatever the text holds";
}

TEST(Amount, BytesAloneWhereNothingElseHasAMeaning) {
  EXPECT_EQ(parse_bytes("96MiB").value(), 96_MiB);
  EXPECT_FALSE(parse_bytes("auto").ok());
  EXPECT_THAT(parse_bytes("50%").error().text, HasSubstr("only bytes"));
}

TEST(Amount, Resolves) {
  EXPECT_EQ(amount("auto").resolve(80_GiB, 7_GiB), 7_GiB);
  EXPECT_EQ(amount("3GiB").resolve(80_GiB, 7_GiB), 3_GiB);
  EXPECT_EQ(amount("25%").resolve(80_GiB, 7_GiB), 20_GiB);
  EXPECT_EQ(amount("0%").resolve(80_GiB, 7_GiB), 0_B);
}

TEST(Glob, StarsCrossDots) {
  EXPECT_TRUE(glob_matches("layer.*.moe.fc1", "layer.7.moe.fc1"));
  EXPECT_TRUE(glob_matches("layer.*.fc1", "layer.7.moe.fc1"));
  EXPECT_TRUE(glob_matches("*", ""));
  EXPECT_TRUE(glob_matches("*", "layer.7"));
  EXPECT_TRUE(glob_matches("*.fc1", "layer.1.fc1.fc1"));
  EXPECT_TRUE(glob_matches("a*b*c", "a.b.b.c"));
  EXPECT_TRUE(glob_matches("layer.7", "layer.7"));
  EXPECT_FALSE(glob_matches("layer.7", "layer.77"));
  EXPECT_FALSE(glob_matches("layer.*.fc1", "layer.7.fc2"));
  EXPECT_FALSE(glob_matches("a*b*c", "a.c.b"));
  EXPECT_FALSE(glob_matches("", "a"));
  EXPECT_FALSE(glob_matches("layer.*.fc1", "layer.fc1"));
}

TEST(Glob, ManyStarsStayCheap) {
  std::string glob, name(4000, 'a');
  for (int i = 0; i < 60; ++i) glob += "a*";
  EXPECT_FALSE(glob_matches(glob + "b", name));  // exponential matchers don't return from this
}

TEST(Rules, HighestPriorityDecidesAndOfEqualsTheFirst) {
  const SiteSpec site{"layer.7.moe.fc1", SiteKind::kGmm, 7, "moe.fc1"};
  std::vector<Rule> rules(3);
  rules[0] = {.match = "layer.*", .kind = {}, .action = RuleAction::kHbm, .priority = 5};
  rules[1] = {.match = "*.fc1", .kind = {}, .action = RuleAction::kDdr, .priority = 5};
  rules[2] = {.match = "*", .kind = {}, .action = RuleAction::kDiscard, .priority = 1};
  EXPECT_EQ(deciding_rule(rules, site, RulePhase::kForward, 0), rules.data());
  rules[1].priority = 6;
  EXPECT_EQ(decide(rules, site, RulePhase::kForward, 0), RuleAction::kDdr);
  EXPECT_EQ(deciding_rule({}, site, RulePhase::kForward, 0), nullptr);
  EXPECT_EQ(decide({}, site, RulePhase::kForward, 0), RuleAction::kAuto);
}

TEST(Rules, EachConditionLimits) {
  const SiteSpec site{"layer.7.moe.fc1", SiteKind::kGmm, 7, "moe.fc1"};
  Rule rule{
      .match = "layer.7.*", .kind = SiteKind::kGmm, .phase = RulePhase::kForward, .action = RuleAction::kDdr};
  rule.first_step = 10;
  rule.last_step = 20;
  const auto decided = [&](const Rule& r, RulePhase phase, std::uint64_t step) {
    return decide({r}, site, phase, step);
  };
  EXPECT_EQ(decided(rule, RulePhase::kForward, 10), RuleAction::kDdr);
  EXPECT_EQ(decided(rule, RulePhase::kForward, 20), RuleAction::kDdr);
  EXPECT_EQ(decided(rule, RulePhase::kForward, 9), RuleAction::kAuto);
  EXPECT_EQ(decided(rule, RulePhase::kForward, 21), RuleAction::kAuto);
  EXPECT_EQ(decided(rule, RulePhase::kRecompute, 15), RuleAction::kAuto);
  EXPECT_EQ(decided(rule, RulePhase::kAny, 15), RuleAction::kDdr);
  rule.kind = SiteKind::kScan;
  EXPECT_EQ(decided(rule, RulePhase::kForward, 15), RuleAction::kAuto);
  rule.kind = {};
  rule.match = "layer.8.*";
  EXPECT_EQ(decided(rule, RulePhase::kForward, 15), RuleAction::kAuto);
}

TEST(Words, NearestTakesTheFewestEdits) {
  constexpr std::string_view known[] = {"budget", "reserve"};
  EXPECT_EQ(nearest_word("bugdet", known), "budget");
  EXPECT_EQ(nearest_word("reserved", known), "reserve");
  EXPECT_EQ(nearest_word("", known), "budget");
  EXPECT_EQ(nearest_word(std::string(100000, 'x'), known), "budget");
}

TEST(Words, QuotingCutsBetweenCharacters) {
  std::string text(59, 'a');
  text += "\xC3\xA9\xC3\xA9";  // two-byte characters across the cut
  EXPECT_EQ(in_quotes(text), "\"" + std::string(59, 'a') + "...\"");
}

}  // namespace
}  // namespace terrace
