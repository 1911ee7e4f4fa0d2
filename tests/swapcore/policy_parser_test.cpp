// A policy from text: every key, the defaults, and errors in one line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "swapcore/policy/policy.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

Policy policy(std::string_view text) {
  auto parsed = parse_policy(text, "p.toml");
  EXPECT_TRUE(parsed.ok()) << (parsed ? "" : parsed.error().text);
  return parsed ? *std::move(parsed) : Policy{};
}

std::string policy_error(std::string_view text) {
  const auto parsed = parse_policy(text, "p.toml");
  EXPECT_FALSE(parsed.ok()) << text;
  return parsed ? "" : parsed.error().text;
}

TEST(Policy, AnEmptyFileGivesTheDefaults) {
  for (const char* text : {"", "\n", "# nothing\n", "[hbm]\n[ddr]\n", "version = 1"}) {
    const Policy p = policy(text);
    EXPECT_EQ(p.hbm.budget, Amount::of_share(0.9));
    EXPECT_EQ(p.hbm.reserve, Amount::of(2_GiB));
    EXPECT_EQ(p.swapcore.mode, SwapMode::kAuto);
    EXPECT_EQ(p.metrics.listen, "127.0.0.1:9464");
  }
}

TEST(Policy, EveryKeyReachesItsField) {
  const Policy p = policy(R"(
version = 1
hbm = { budget = "40GiB", reserve = "1GiB" }
[ddr]
budget = "60%"
numa = [1, 0]
hugepages = false
[swapcore]
mode = "rules"
hbm_budget = "3GiB"
ddr_budget = "25%"
[[swapcore.rule]]
match = "layer.*.moe.fc1"
kind = "gmm"
phase = "recompute"
steps = "5..100"
action = "discard"
priority = -4
[[swapcore.rule]]
match = "*"
kind = "any"
steps = "7.."
action = "auto"
[checkpoint]
budget = "2GiB"
contingency = "fail"
[experts]
resident = "12GiB"
prefetch = 3
[optimizer]
tier = "ddr"
[metrics]
listen = "[::1]:0"
[daemon]
socket = "/tmp/t.sock"
)");
  EXPECT_EQ(p.hbm.budget, Amount::of(40_GiB));
  EXPECT_EQ(p.hbm.reserve, Amount::of(1_GiB));
  EXPECT_EQ(p.ddr.budget, Amount::of_share(0.6));
  EXPECT_EQ(p.ddr.numa, NumaMode::kNodes);
  EXPECT_THAT(p.ddr.nodes, testing::ElementsAre(1, 0));
  EXPECT_EQ(p.ddr.hugepages, HugePages::kOff);
  EXPECT_EQ(p.swapcore.mode, SwapMode::kRules);
  EXPECT_EQ(p.swapcore.hbm_budget, Amount::of(3_GiB));
  EXPECT_EQ(p.swapcore.ddr_budget, Amount::of_share(0.25));
  ASSERT_EQ(p.swapcore.rules.size(), 2u);
  const Rule& first = p.swapcore.rules[0];
  EXPECT_EQ(first.match, "layer.*.moe.fc1");
  EXPECT_EQ(first.kind, SiteKind::kGmm);
  EXPECT_EQ(first.phase, RulePhase::kRecompute);
  EXPECT_EQ(first.first_step, 5u);
  EXPECT_EQ(first.last_step, 100u);
  EXPECT_EQ(first.action, RuleAction::kDiscard);
  EXPECT_EQ(first.priority, -4);
  const Rule& second = p.swapcore.rules[1];
  EXPECT_FALSE(second.kind.has_value());
  EXPECT_EQ(second.first_step, 7u);
  EXPECT_EQ(second.last_step, UINT64_MAX);
  EXPECT_EQ(p.checkpoint.budget, Amount::of(2_GiB));
  EXPECT_EQ(p.checkpoint.contingency, Contingency::kFail);
  EXPECT_EQ(p.experts.resident, Amount::of(12_GiB));
  EXPECT_EQ(p.experts.prefetch, 3);
  EXPECT_EQ(p.optimizer.tier, StateTier::kDdr);
  EXPECT_EQ(p.metrics.listen, "[::1]:0");
  EXPECT_EQ(p.daemon.socket, "/tmp/t.sock");
}

TEST(Policy, NamesTheFilesOfTheHttpServer) {
  const Policy p = policy(R"([metrics]
tls_cert = "/etc/terrace/node.pem"
tls_key = "/etc/terrace/node.key"
auth_file = "/etc/terrace/readers")");
  EXPECT_EQ(p.metrics.tls_cert, "/etc/terrace/node.pem");
  EXPECT_EQ(p.metrics.tls_key, "/etc/terrace/node.key");
  EXPECT_EQ(p.metrics.auth_file, "/etc/terrace/readers");
}

TEST(Policy, HugePagesAreASwitchOrExplicit) {
  EXPECT_EQ(policy("").ddr.hugepages, HugePages::kTransparent);
  EXPECT_EQ(policy("[ddr]\nhugepages = true").ddr.hugepages, HugePages::kTransparent);
  EXPECT_EQ(policy("[ddr]\nhugepages = false").ddr.hugepages, HugePages::kOff);
  EXPECT_EQ(policy("[ddr]\nhugepages = \"explicit\"").ddr.hugepages, HugePages::kExplicit);
  EXPECT_THAT(policy_error("[ddr]\nhugepages = \"Explicit\""), StartsWith("p.toml:2:13: ddr.hugepages: "));
}

TEST(Policy, ASocketPathMayBeAsLongAsTheSystemTakes) {
  const std::string longest = "/" + std::string(106, 's');
  EXPECT_EQ(policy("[daemon]\nsocket = \"" + longest + "\"").daemon.socket, longest);
  EXPECT_THAT(policy_error("[daemon]\nsocket = \"" + longest + "s\""),
              StartsWith("p.toml:2:10: daemon.socket: "));
}

TEST(Policy, ErrorsAreOneLineWhateverAKeyHolds) {
  const std::string text = policy_error("\"a\\nb\" = 1");
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_THAT(text, StartsWith("p.toml:1:1: a\\x0ab: unknown key"));
}

TEST(Policy, ASyntaxErrorThatQuotesTheFileIsFitForATerminal) {
  const auto parsed = parse_policy("a = n\x7F\n", "p\x1B[2J.toml");
  ASSERT_FALSE(parsed.ok());
  EXPECT_THAT(parsed.error().text, StartsWith("p\\x1b[2J.toml:1:6: syntax: "));
  EXPECT_THAT(parsed.error().text, HasSubstr("n\\x7f"));
}

TEST(Policy, AnAddressIsCheckedBeforeAnybodyListens) {
  for (const char* good : {"127.0.0.1:1", "0.0.0.0:65535", "[::]:9464", "localhost:9464", "node-7.cluster:0"})
    EXPECT_EQ(policy("[metrics]\nlisten = \"" + std::string(good) + "\"").metrics.listen, good);
  for (const char* bad :
       {"", ":9464", "9464", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:94x", "127.0.0.1:65536", "127.0.0:1",
        "::1:9464", "[::1]", "[::g]:1", "[]:1", "a b:1", "-a:1", "http://a:1"})
    EXPECT_THAT(policy_error("[metrics]\nlisten = \"" + std::string(bad) + "\""),
                StartsWith("p.toml:2:10: metrics.listen: "));
}

TEST(Policy, TheFirstProblemInReadingOrderIsReported) {
  EXPECT_THAT(policy_error("[daemon]\nsocket = \"x\"\n[hbm]\nbudget = \"x\""),
              StartsWith("p.toml:2:10: daemon.socket"));
  EXPECT_THAT(policy_error("[hbm]\nbudget = \"x\"\n[daemon]\nsocket = \"x\""),
              StartsWith("p.toml:2:10: hbm.budget"));
}

TEST(Policy, TextBeyondAMebibyteIsRefused) {
  EXPECT_THAT(policy_error(std::string((1 << 20) + 1, '\n')), HasSubstr("larger than 1 MiB"));
}

}  // namespace
}  // namespace terrace
