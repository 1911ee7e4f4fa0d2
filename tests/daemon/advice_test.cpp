// What terrace advise says: only what the counters show.
#include "daemon/advice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace terrace {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

// Ten steps of a second, half of HBM held, nothing moved and nothing waited for.
Watched calm() {
  Watched watched;
  JobStatus& job = watched.before;
  job.job = "j";
  job.processes = 1;
  job.budget.set("hbm", 100ULL << 30);
  job.peak_bytes.set("hbm", 50ULL << 30);
  job.budget.set("ddr", 10ULL << 30);
  watched.after = job;
  watched.after.steps = 10;
  watched.after.step_seconds = 10;
  return watched;
}

TEST(Advice, AJobThatFitsHasNothingToGain) {
  const Advice advice = advise(calm());
  EXPECT_THAT(advice.suggestions, IsEmpty());
  EXPECT_THAT(advice_text(advice), HasSubstr("Nothing to gain"));
  EXPECT_THAT(advice.observed, HasSubstr("10 steps, 1000.0 ms each"));
  EXPECT_THAT(advice.observed, HasSubstr("50% of its budget"));
}

TEST(Advice, AWaitIsWorthAtMostItself) {
  const std::pair<const char*, const char*> keys[] = {
      {"restore_late", "ddr_budget"},      {"spill_backpressure", "ddr_budget"},
      {"budget", "contingency"},           {"expert_late", "prefetch"},
      {"router_word", "load = \"layer\""}, {"optimizer_late", "tier = \"hbm\""}};
  for (const auto& [reason, key] : keys) {
    Watched watched = calm();
    watched.after.stall_seconds.set(reason, 0.5);
    const Advice advice = advise(watched);
    ASSERT_THAT(advice.suggestions, SizeIs(1)) << reason;
    EXPECT_EQ(advice.suggestions[0].gain, "at most 5.0% of a step");
    EXPECT_THAT(advice.suggestions[0].policy, HasSubstr(key));
  }
}

TEST(Advice, OnlyWhatHappenedWhileItWatched) {
  Watched watched = calm();
  watched.before.stall_seconds.set("restore_late", 5);  // earlier, while the session measured
  watched.after.stall_seconds.set("restore_late", 5);
  watched.before.damaged_blocks = watched.after.damaged_blocks = 1;
  EXPECT_THAT(advise(watched).suggestions, IsEmpty());
}

TEST(Advice, TheOptimizerGoesHomeOnlyWhereItHasRoom) {
  Watched watched = calm();
  watched.after.peak_bytes.set("hbm", 95ULL << 30);
  watched.after.stall_seconds.set("optimizer_late", 0.5);
  EXPECT_THAT(advise(watched).suggestions[0].policy, IsEmpty());
}

TEST(Advice, MissesAreExplainedByWhatIsFull) {
  Watched watched = calm();
  watched.after.fetches.set("miss", 40);
  EXPECT_THAT(advise(watched).suggestions[0].policy, HasSubstr("hbm_budget = \"auto\""));
  EXPECT_THAT(advise(watched).suggestions[0].gain, HasSubstr("up to 4 outputs a step"));

  watched.after.peak_bytes.set("hbm", 99ULL << 30);
  watched.after.peak_bytes.set("ddr", 10ULL << 30);
  watched.node_free.set("ddr", 6ULL << 30);
  EXPECT_THAT(advise(watched).suggestions[0].policy, HasSubstr("budget = \"16384MiB\""));

  watched.node_free.set("ddr", 0);
  watched.after.window_capacity_bytes.set("d2h", 1000);
  watched.after.window_bytes.set("d2h", 950);
  EXPECT_THAT(advise(watched).suggestions[0].finding, HasSubstr("the link is full"));

  watched.after.window_bytes.set("d2h", 300);
  EXPECT_THAT(advise(watched).suggestions[0].finding, HasSubstr("30% of the link's windows"));
  EXPECT_THAT(advise(watched).suggestions[0].policy, IsEmpty());
}

TEST(Advice, TheMostValuableComesFirstAndDamageBeforeAll) {
  Watched watched = calm();
  watched.after.stall_seconds.set("budget", 0.2);
  watched.after.stall_seconds.set("expert_late", 0.7);
  watched.after.damaged_blocks = 2;
  const Advice advice = advise(watched);
  ASSERT_THAT(advice.suggestions, SizeIs(3));
  EXPECT_THAT(advice.suggestions[0].policy, HasSubstr("verify"));
  EXPECT_THAT(advice.suggestions[1].policy, HasSubstr("prefetch"));
  EXPECT_THAT(advice_text(advice), HasSubstr("    [experts]\n    prefetch = 2\n"));
}

}  // namespace
}  // namespace terrace
