// A session under a small pretended model: layers whose one site's output is a block of known bytes.
#include "swapcore/session.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/swapcore/session_fixture.hpp"

namespace terrace {
namespace {

constexpr int kLayers = 6;
constexpr Bytes kOutput = 1_MiB;

class SessionTest : public OneSiteALayer {
 protected:
  SessionTest()
      : OneSiteALayer(kLayers,
                      {.capacity = 256_MiB, .h2d_bytes_per_second = 1e9, .d2h_bytes_per_second = 1e9}) {
    policy_.hbm.budget = Amount::of(64_MiB);
    policy_.ddr.budget = Amount::of(256_MiB);
  }

  // Computing takes a while on the stream, so that recomputing costs something.
  BlockRef compute_output(int layer) {
    Session::Timing timing(*session_, site(layer));
    auto block = session_->allocate(kOutput, Pool::kActivation);
    if (!block) return nullptr;
    EXPECT_TRUE(device_->launch_host(compute_, [address = (*block)->address, layer] {
      for (int round = 0; round < 20; ++round) std::memset(address, layer + 1, kOutput.count());
    }));
    return *block;
  }
  void expect_output(const BlockRef& block, int layer) {
    EXPECT_TRUE(device_->launch_host(compute_, [block, layer] {
      for (const std::uint64_t at : {std::uint64_t{0}, kOutput.count() / 2, kOutput.count() - 1}) {
        EXPECT_EQ(std::to_integer<int>(block->address[at]), layer + 1);
      }
    }));
  }
  // One step; returns the number of outputs that had to be computed again.
  int run_step() {
    int computed_again = 0;
    session_->begin_step();
    for (int l = 0; l < kLayers; ++l) {
      session_->enter_forward(l);
      const BlockRef output = compute_output(l);
      session_->offer({site(l)}, output);
    }
    session_->enter_head();
    for (int l = kLayers - 1; l >= 0; --l) {
      session_->enter_backward(l);
      BlockRef output = session_->fetch({site(l)});
      if (output == nullptr) {
        ++computed_again;
        output = compute_output(l);
      }
      expect_output(output, l);
    }
    EXPECT_TRUE(device_->synchronize(compute_));
    session_->end_step();
    return computed_again;
  }
};

TEST_F(SessionTest, TheThirdStepRunsByThePlan) {
  open();
  const auto group_fetches = [this] {
    return metrics().site_groups().counts(site_group_row(session_->site(site(0)).group));
  };
  const SiteGroups::Counts before = group_fetches();
  EXPECT_EQ(run_step(), kLayers);
  EXPECT_EQ(run_step(), kLayers);
  EXPECT_EQ(run_step(), 0) << session_->plan_summary();
  const SessionCounters counters = session_->counters();
  EXPECT_EQ(counters.hits + counters.late, static_cast<std::uint64_t>(kLayers));
  EXPECT_EQ(counters.misses, static_cast<std::uint64_t>(2 * kLayers));
  const SiteGroups::Counts after = group_fetches();
  EXPECT_EQ(after[0] + after[2] - before[0] - before[2], counters.hits + counters.late);
  EXPECT_EQ(after[1] - before[1], counters.misses);
}

// Fragments are larger than the measured step told: the next plan leaves more to them, and keeps less.
TEST_F(SessionTest, APlanIsMadeAnewWhereTheTrainerFoundNoRoom) {
  policy_.hbm.budget = Amount::of(7296_KiB);
  policy_.ddr.budget = Amount::of(0_B);
  open();
  for (int i = 0; i < 3; ++i) run_step();
  ASSERT_NE(session_->plan(), nullptr);
  const int kept = session_->plan()->hbm_sites;
  ASSERT_GT(kept, 1);
  {
    std::vector<BlockRef> others;  // all there is, and what is kept has to go
    for (int i = 0; i < 8; ++i)
      if (auto block = session_->allocate(1_MiB, Pool::kScratch)) others.push_back(*block);
    EXPECT_FALSE(session_->allocate(1_MiB, Pool::kScratch));
  }
  for (int i = 0; i < 500 && session_->plan()->hbm_sites == kept; ++i) run_step();
  EXPECT_EQ(session_->plan()->hbm_sites, kept - 1) << session_->plan_summary();
}

TEST_F(SessionTest, ThePlanSaysWhatItsStepsTakeAndHold) {
  open();
  for (int i = 0; i < 2; ++i) run_step();
  ASSERT_NE(session_->plan(), nullptr);
  EXPECT_FALSE(session_->prediction_error()) << "no step ran by it yet";
  run_step();
  ASSERT_TRUE(device_->synchronize(compute_)) << "the end of the step has its event";
  const Prediction& prediction = session_->plan()->prediction;
  EXPECT_GT(prediction.step_seconds, 0);
  EXPECT_EQ(prediction.hbm.size(), 2U * kLayers + 1);
  EXPECT_GE(prediction.hbm_peak, kOutput * kLayers);
  const auto error = session_->prediction_error();
  ASSERT_TRUE(error);
  // The step is known to have been by the plan when the next begins.
  const auto seconds = [](Estimate estimate) {
    return metrics().value<Metric::kPlannedStepSeconds>(estimate);
  };
  const std::uint64_t steps = metrics().value<Metric::kPlannedSteps>(),
                      predicted = seconds(Estimate::kPredicted);
  const std::uint64_t measured = seconds(Estimate::kMeasured);
  const std::uint64_t expected = detail::nanoseconds_of(prediction.step_seconds);
  const Bytes hbm_peak = prediction.hbm_peak;
  session_->begin_step();
  session_->cancel_step();
  EXPECT_EQ(metrics().value<Metric::kPlannedSteps>() - steps, 1U);
  EXPECT_EQ(seconds(Estimate::kPredicted) - predicted, expected);
  EXPECT_NEAR(static_cast<double>(seconds(Estimate::kMeasured) - measured),
              static_cast<double>(expected) * (1 + error->step_share), 2.0);
  EXPECT_EQ(metrics().value<Metric::kPlannedPeakBytes>(TierId::kHbm, Estimate::kPredicted), hbm_peak.count());
  EXPECT_LE(std::abs(error->hbm_bytes), static_cast<std::int64_t>(kOutput.count()));
  EXPECT_EQ(error->ddr_bytes, 0);
  ASSERT_NE(session_->snapshot(), nullptr);
  EXPECT_EQ(session_->snapshot()->micro_batches, 1);
}

TEST_F(SessionTest, ThePredictionTakesUpWhatTheFirstStepsByThePlanMeasured) {
  open();
  for (int i = 0; i < 3; ++i) run_step();
  const double modelled = session_->plan()->prediction.step_seconds;
  EXPECT_EQ(session_->plan()->prediction.residual_share, 0);
  for (int i = 0; i < 4; ++i) {
    run_step();
    ASSERT_TRUE(device_->synchronize(compute_));
  }
  session_->begin_step();
  session_->cancel_step();
  const Prediction& corrected = session_->plan()->prediction;
  EXPECT_NE(corrected.residual_share, 0);
  EXPECT_NEAR(corrected.step_seconds, modelled * (1 + corrected.residual_share), 1e-12);
}

// Nothing stays: everything that the plan keeps travels, and comes back for the moment it is asked for.
TEST_F(SessionTest, WhatThePlanSendsAwayComesBackByThePlan) {
  policy_.swapcore.hbm_budget = Amount::of(0_B);
  open();
  for (int i = 0; i < 2; ++i) run_step();
  ASSERT_NE(session_->plan(), nullptr);
  std::size_t planned = 0;
  for (const auto& moment : session_->plan()->restores) planned += moment.size();
  EXPECT_EQ(planned, static_cast<std::size_t>(session_->plan()->ddr_sites));
  EXPECT_EQ(session_->plan()->hbm_sites, 0);
  const int computed_again = run_step();
  EXPECT_EQ(computed_again, kLayers - static_cast<int>(planned)) << session_->plan_summary();
}

TEST_F(SessionTest, OffCachesNothingAndCountsNothing) {
  policy_.swapcore.mode = SwapMode::kOff;
  open();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(run_step(), kLayers);
  EXPECT_EQ(session_->counters().misses, 0U);
}

TEST_F(SessionTest, ARuleSendsOutputsToDdrAndTheyComeBackRight) {
  policy_.swapcore.rules.push_back({.match = "layer.*.fc", .kind = {}, .action = RuleAction::kDdr});
  open();
  run_step();
  EXPECT_GT(session_->counters().spilled, 0_B);
  run_step();
  EXPECT_GE(session_->ddr_usage().live_peak, kOutput);
}

TEST_F(SessionTest, ADiscardRuleKeepsAnOutputOut) {
  policy_.swapcore.rules.push_back({.match = "layer.2.fc", .kind = {}, .action = RuleAction::kDiscard});
  open();
  for (int i = 0; i < 2; ++i) run_step();
  EXPECT_EQ(run_step(), 1);
}

TEST_F(SessionTest, TheSwapcoreBudgetBinds) {
  policy_.swapcore.hbm_budget = Amount::of(2_MiB);
  policy_.swapcore.ddr_budget = Amount::of(0_B);
  open();
  for (int i = 0; i < 2; ++i) run_step();
  EXPECT_EQ(run_step(), kLayers - 2);
}

TEST_F(SessionTest, CachedOutputsMakeWayForMemoryThatIsNeeded) {
  policy_.hbm.budget = Amount::of(8_MiB);
  policy_.swapcore.rules.push_back({.match = "**", .kind = {}, .action = RuleAction::kHbm});
  policy_.swapcore.rules.back().match = "layer.*.fc";
  open();
  session_->begin_step();
  for (int l = 0; l < kLayers; ++l) {
    session_->enter_forward(l);
    session_->offer({site(l)}, compute_output(l));
  }
  auto large = session_->allocate(6_MiB, Pool::kScratch);
  ASSERT_TRUE(large) << large.error().text;
  EXPECT_GE(session_->counters().evictions, 4U);
  EXPECT_EQ(session_->fetch({sites_[0]}), nullptr) << "the output used last went first";
  EXPECT_LE(session_->hbm_usage().mapped_peak, 8_MiB);
  session_->end_step();
}

TEST_F(SessionTest, WhatWasRestoredAheadMakesWayForMemoryThatIsNeededNow) {
  policy_.hbm.budget = Amount::of(8_MiB);
  policy_.swapcore.rules.push_back({.match = "layer.*.fc", .kind = {}, .action = RuleAction::kDdr});
  open();
  session_->begin_step();
  for (int l = 0; l < kLayers; ++l) {
    session_->enter_forward(l);
    session_->offer({site(l)}, compute_output(l));
  }
  ASSERT_TRUE(session_->allocate(8_MiB, Pool::kScratch)) << "everything cached has left or goes";
  session_->enter_head();
  session_->enter_backward(kLayers - 1);
  auto needed = session_->allocate(8_MiB, Pool::kScratch);
  EXPECT_TRUE(needed) << needed.error().text;
  session_->end_step();
}

TEST_F(SessionTest, TheSwapcoreDdrBudgetBindsRulesToo) {
  policy_.swapcore.ddr_budget = Amount::of(2_MiB);
  policy_.swapcore.rules.push_back({.match = "layer.*.fc", .kind = {}, .action = RuleAction::kDdr});
  open();
  run_step();
  EXPECT_EQ(session_->counters().spilled, 2_MiB);
}

TEST_F(SessionTest, ARuleThatHasEndedLeavesTheSiteToThePlan) {
  policy_.swapcore.rules.push_back(
      {.match = "layer.2.fc", .kind = {}, .action = RuleAction::kDiscard, .first_step = 0, .last_step = 3});
  open();
  for (int i = 0; i < 2; ++i) run_step();
  EXPECT_EQ(run_step(), 1);
  EXPECT_EQ(run_step(), 1);
  EXPECT_EQ(run_step(), 0);
}

TEST_F(SessionTest, CachedOutputsMakeWayForSavedActivationsUnlessThePolicySaysFail) {
  for (const Contingency contingency : {Contingency::kOffload, Contingency::kRecompute, Contingency::kFail}) {
    policy_.checkpoint.budget = Amount::of(2_MiB);
    policy_.checkpoint.contingency = contingency;
    policy_.swapcore.rules = {{.match = "layer.*.fc", .kind = {}, .action = RuleAction::kHbm}};
    sites_.clear();
    session_.reset();
    open();
    session_->begin_step();
    session_->offer({sites_[0]}, compute_output(0));
    ASSERT_TRUE(session_->save({.layer = 0}, compute_output(0)));
    EXPECT_EQ(session_->save({.layer = 1}, compute_output(1)).ok(), contingency != Contingency::kFail);
    EXPECT_EQ(session_->counters().evictions, contingency == Contingency::kFail ? 0U : 1U);
    EXPECT_EQ(session_->save({.layer = 2}, compute_output(2)).ok(), contingency == Contingency::kOffload);
  }
}

TEST_F(SessionTest, ARefusalSaysHowMuchIsMissingForWhatAndWhatWouldHelp) {
  policy_.hbm.budget = Amount::of(8_MiB);
  policy_.swapcore.mode = SwapMode::kOff;
  open();
  auto held = session_->allocate(6_MiB, Pool::kWeights);
  ASSERT_TRUE(held);
  auto refused = session_->allocate(4_MiB, Pool::kActivation);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
  const std::string& text = refused.error().text;
  EXPECT_NE(text.find("(2097152 bytes)"), std::string::npos) << text;
  EXPECT_NE(text.find("activation"), std::string::npos) << text;
  EXPECT_NE(text.find("weights 6.0 MiB"), std::string::npos) << text;
  EXPECT_NE(text.find("[hbm] budget"), std::string::npos) << text;
  EXPECT_NE(text.find("[swapcore] mode = \"auto\""), std::string::npos) << text;
}

TEST_F(SessionTest, SavedActivationsGoToDdrBeyondTheCheckpointBudget) {
  policy_.checkpoint.budget = Amount::of(3_MiB);
  policy_.swapcore.mode = SwapMode::kOff;
  open();
  session_->begin_step();
  for (int l = 0; l < kLayers; ++l) {
    session_->enter_forward(l);
    ASSERT_TRUE(session_->save({.layer = l}, compute_output(l)));
  }
  EXPECT_GE(session_->ddr_usage().live_peak, 3_MiB);
  session_->enter_head();
  for (int l = kLayers - 1; l >= 0; --l) {
    session_->enter_backward(l);
    auto block = session_->load({.layer = l});
    ASSERT_TRUE(block) << block.error().text;
    expect_output(*block, l);
  }
  EXPECT_EQ(session_->load({.layer = 0}).error().code, Errc::kNotFound);
  ASSERT_TRUE(device_->synchronize(compute_));
  session_->end_step();
}

TEST_F(SessionTest, ContingencyFailRefusesWhatExceedsTheCheckpointBudget) {
  policy_.checkpoint.budget = Amount::of(2_MiB);
  policy_.checkpoint.contingency = Contingency::kFail;
  open();
  ASSERT_TRUE(session_->save({.layer = 0}, compute_output(0)));
  ASSERT_TRUE(session_->save({.layer = 1}, compute_output(1)));
  const Status refused = session_->save({.layer = 2}, compute_output(2));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().text.find("checkpoint.budget"), std::string::npos) << refused.error().text;
}

TEST_F(SessionTest, ABudgetLargerThanTheDeviceIsRefused) {
  policy_.hbm.budget = Amount::of(1_GiB);
  auto session = Session::open(*device_, {.policy = policy_, .join_daemon = false, .compute = compute_});
  ASSERT_FALSE(session);
  EXPECT_EQ(session.error().code, Errc::kInvalidArgument);
}

TEST_F(SessionTest, ANumaNodeThatIsNotThereIsRefused) {
  policy_.ddr.numa = NumaMode::kNodes;
  policy_.ddr.nodes = {0, 4000};
  auto session = Session::open(*device_, {.policy = policy_, .join_daemon = false, .compute = compute_});
  ASSERT_FALSE(session);
  EXPECT_NE(session.error().text.find("no NUMA node 4000"), std::string::npos) << session.error().text;
}

// Every output is right and the budget holds, whichever call fails: a miss at worst.
TEST_F(SessionTest, NoFailedCallChangesAByte) {
  policy_.hbm.budget = Amount::of(12_MiB);
  open();
  for (const FaultPoint point :
       {FaultPoint::kDeviceCopy, FaultPoint::kDeviceWait, FaultPoint::kDevicePin, FaultPoint::kHostMap}) {
    for (std::uint64_t nth = 1; nth <= 12; ++nth) {
      ScopedFaults faults(fail_call(point, nth));
      session_->begin_step();
      for (int l = 0; l < kLayers; ++l) {
        session_->enter_forward(l);
        if (const BlockRef output = compute_output(l)) session_->offer({site(l)}, output);
      }
      session_->enter_head();
      for (int l = kLayers - 1; l >= 0; --l) {
        session_->enter_backward(l);
        if (const BlockRef output = session_->fetch({site(l)})) expect_output(output, l);
      }
      EXPECT_TRUE(device_->synchronize(compute_));
      session_->end_step();
    }
  }
}

}  // namespace
}  // namespace terrace
