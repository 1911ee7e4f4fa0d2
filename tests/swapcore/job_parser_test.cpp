// [daemon]'s group, readers and [[daemon.job]].
#include "swapcore/policy/job_parser.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using testing::HasSubstr;

TEST(JobParser, EveryKeyReachesItsField) {
  const auto policy = parse_policy(R"([daemon]
group = "trainers"
readers = "*"
[[daemon.job]]
match = "pretrain-*"
user = "ada"
priority = 4
hbm_guarantee = "25%"
ddr_guarantee = "8GiB"
link_guarantee = "30%"
[[daemon.job]]
match = "*"
)",
                                   "p.toml");
  ASSERT_TRUE(policy.ok()) << policy.error().text;
  EXPECT_EQ(policy->daemon.group, "trainers");
  EXPECT_EQ(policy->daemon.readers, "*");
  ASSERT_EQ(policy->daemon.jobs.size(), 2u);
  EXPECT_EQ(policy->daemon.jobs[0].match, "pretrain-*");
  EXPECT_EQ(policy->daemon.jobs[0].user, "ada");
  EXPECT_EQ(policy->daemon.jobs[0].priority, 4);
  EXPECT_EQ(policy->daemon.jobs[0].hbm_guarantee, Amount::of_share(0.25));
  EXPECT_EQ(policy->daemon.jobs[0].ddr_guarantee, Amount::of(8_GiB));
  EXPECT_EQ(policy->daemon.jobs[0].link_guarantee, 0.3);
  EXPECT_EQ(policy->daemon.jobs[1].priority, 1);
  EXPECT_EQ(policy->daemon.jobs[1].hbm_guarantee, Amount::of(0_B));
}

TEST(JobParser, NamesOfAccountsArePlain) {
  for (const char* good : {"", "ada", "team-1", "x.y_z"}) EXPECT_FALSE(account_fault(good)) << good;
  for (const char* bad : {"a b", "a:b", "*", "\u00e9", "a/b"}) EXPECT_TRUE(account_fault(bad)) << bad;
  EXPECT_TRUE(account_fault(std::string(33, 'a')));
}

TEST(JobParser, TheFirstThingWrongIsSaid) {
  const auto problem = [](const char* text) {
    const auto policy = parse_policy(text, "p.toml");
    return policy ? std::string() : policy.error().text;
  };
  EXPECT_THAT(problem("[[daemon.job]]\nmatch = \"a b\"\n"), HasSubstr("p.toml:2:9: daemon.job.match: "));
  EXPECT_THAT(problem("[[daemon.job]]\nmatch = \"a\"\nuser = \"a b\"\n"),
              HasSubstr("p.toml:3:8: daemon.job.user: "));
  EXPECT_THAT(problem("[daemon]\njob = [1]\n"), HasSubstr("holds what is no job"));
  EXPECT_THAT(problem("[[daemon.job]]\nmatch = \"a\"\npriorty = 3\n"), HasSubstr("priority"));
}

}  // namespace
}  // namespace terrace
