#include "swapcore/plan/solver.hpp"

#include <gtest/gtest.h>

#include "swapcore/plan/drift.hpp"

namespace terrace {
namespace {

// `layers` layers of `per_layer` sites; site j of a layer has size and cost by j.
Snapshot make_snapshot(int layers, int per_layer) {
  Snapshot snapshot;
  for (int l = 0; l < layers; ++l) {
    snapshot.layers.push_back(
        {.forward_seconds = 0.01, .backward_seconds = 0.03, .forward_peak = 40_MiB, .backward_peak = 40_MiB});
    for (int j = 0; j < per_layer; ++j) {
      const auto index = static_cast<std::uint32_t>(snapshot.sites.size());
      snapshot.sites.push_back({SiteId{index}, l, 1_MiB, 1e-3 * (j + 1), RuleAction::kAuto});
    }
  }
  snapshot.head = {
      .forward_seconds = 0.01, .backward_seconds = 0.01, .forward_peak = 50_MiB, .backward_peak = 50_MiB};
  snapshot.hbm_budget = 60_MiB;
  snapshot.hbm_cache_limit = 60_MiB;
  snapshot.ddr_cache_limit = 1_GiB;
  return snapshot;
}

TEST(Solver, WhenEverythingFitsNothingIsComputedAgain) {
  Snapshot snapshot = make_snapshot(4, 2);
  const Plan plan = solve(snapshot, Policy{});
  for (const Placement placement : plan.placements) EXPECT_EQ(placement, Placement::kHbm);
  EXPECT_NEAR(plan.recompute_seconds, 0, 1e-12);
  EXPECT_EQ(plan.hbm_bytes, 8_MiB);
}

TEST(Solver, HbmGoesToTheMostRecomputationPerByte) {
  Snapshot snapshot = make_snapshot(4, 4);  // 16 MiB wanted, 10 left at the head
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.hbm_bytes, 10_MiB);
  for (std::size_t i = 0; i < snapshot.sites.size(); ++i) {
    if (i % 4 == 3 || i % 4 == 2) {
      EXPECT_EQ(plan.placements[i], Placement::kHbm) << i;
    }
    if (i % 4 == 0) {
      EXPECT_EQ(plan.placements[i], Placement::kRecompute) << i;
    }
  }
}

TEST(Solver, DdrTakesWhatFitsTheWindows) {
  Snapshot snapshot = make_snapshot(8, 4);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.d2h_bytes_per_second = static_cast<double>((1_MiB).count()) * 1.5 / 0.01;
  snapshot.h2d_bytes_per_second = snapshot.d2h_bytes_per_second;
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.hbm_bytes, 0_B);
  EXPECT_GT(plan.ddr_sites, 8);
  EXPECT_LT(plan.recomputed_sites, 24);
  EXPECT_LT(plan.prediction.stall_seconds, 0.002 * 8);
  for (std::size_t i = 0; i < 16; ++i) {
    if (i % 4 == 3) {
      EXPECT_EQ(plan.placements[i], Placement::kDdr) << "the dearest of the early layers: " << i;
    }
  }
  EXPECT_GT(plan.prediction.link_window_used, 0.85);
}

// Two that cost the same: the layer that is asked for first stays, the other has time to travel.
TEST(Solver, LateLayersStayAndEarlyOnesTravel) {
  Snapshot snapshot = make_snapshot(8, 1);
  for (Position& position : snapshot.layers) position.forward_peak = position.backward_peak = 57_MiB;
  snapshot.head.forward_peak = snapshot.head.backward_peak = 56_MiB;
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second =
      static_cast<double>((1_MiB).count()) * 1.5 / 0.01;
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.recomputed_sites, 0);
  EXPECT_EQ(plan.placements[0], Placement::kDdr);
  EXPECT_EQ(plan.placements[7], Placement::kHbm);
  // Whoever travels is asked back at or before its own backward, not after.
  for (std::size_t moment = 0; moment < plan.restores.size(); ++moment) {
    for (const auto& [site, micro_batch] : plan.restores[moment])
      EXPECT_LE(moment, 16U - static_cast<std::size_t>(snapshot.sites[site.index].layer));
  }
}

TEST(Solver, ARestoreThatCameLateStartsEarlierAndThenStaysAtHome) {
  Snapshot snapshot = make_snapshot(8, 1);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second = 1e10;
  const auto moment_of_first = [&] {
    const Plan plan = solve(snapshot, Policy{});
    for (std::size_t moment = 0; moment < plan.restores.size(); ++moment) {
      for (const auto& [site, micro_batch] : plan.restores[moment])
        if (site.index == 0) return static_cast<int>(moment);
    }
    return -1;
  };
  const int before = moment_of_first();
  ASSERT_GT(before, 8 + 2);
  snapshot.sites[0].lateness = 2;
  EXPECT_EQ(moment_of_first(), before - 2);
  snapshot.sites[0].lateness = kMostLead + 1;
  EXPECT_EQ(moment_of_first(), -1);
}

TEST(Solver, ASpillThatWasNotGoneInTimeIsDueLaterAndThenStaysAtHome) {
  Snapshot snapshot = make_snapshot(8, 1);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second = 1e10;
  const auto departure_of_first = [&] {
    const Plan plan = solve(snapshot, Policy{});
    for (std::size_t moment = 0; moment < plan.departures.size(); ++moment) {
      for (const auto& [site, micro_batch] : plan.departures[moment])
        if (site.index == 0) return static_cast<int>(moment);
    }
    return -1;
  };
  EXPECT_EQ(departure_of_first(), 1);
  snapshot.sites[0].delay = 2;
  EXPECT_EQ(departure_of_first(), 3);
  snapshot.sites[0].delay = kMostLead + 1;
  EXPECT_EQ(departure_of_first(), -1);
}

TEST(Solver, DegenerateInputsGiveAPlan) {
  const auto plan_of = [](auto change) {
    Snapshot snapshot = make_snapshot(3, 2);
    snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second = 1e12;
    change(snapshot);
    return solve(snapshot, Policy{});
  };
  EXPECT_EQ(plan_of([](Snapshot& s) { s = {}; }).prediction.step_seconds, 0);
  EXPECT_EQ(plan_of([](Snapshot& s) {
              s.hbm_cache_limit = 0_B;
              s.h2d_bytes_per_second = 0;
            }).recomputed_sites,
            6);
  EXPECT_EQ(plan_of([](Snapshot& s) { s.hbm_cache_limit = s.ddr_cache_limit = 0_B; }).recomputed_sites, 6);
  const Plan none = plan_of([](Snapshot& s) { s.hbm_budget = 0_B; });
  EXPECT_EQ(none.recomputed_sites, 6);
  EXPECT_NEAR(none.prediction.step_seconds, 0.13, 1e-9) << "full recomputation";
  EXPECT_EQ(none.prediction.hbm_peak, 50_MiB) << "what is needed with nothing cached";
  const Plan one = plan_of([](Snapshot& s) {
    s.layers.resize(1);
    s.sites.resize(2);
  });
  EXPECT_EQ(one.hbm_sites, 2);
}

TEST(Prediction, KnowsItsOwnError) {
  Snapshot snapshot = make_snapshot(4, 2);
  snapshot.micro_batches = 3;
  snapshot.other_seconds = 0.5;
  snapshot.other_peak = 59_MiB;
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_NEAR(plan.prediction.step_seconds, 0.5 + 3 * (4 * 0.01 + 0.01 + 4 * (0.03 - 0.003)), 1e-9);
  EXPECT_EQ(plan.prediction.hbm_peak, 59_MiB);
  EXPECT_EQ(plan.prediction.hbm[4], 58_MiB) << "the head, with eight outputs";
  EXPECT_EQ(plan.prediction.hbm.back(), 40_MiB) << "the first layer's own backward";
  const auto error = plan.prediction.error({.step_seconds = plan.prediction.step_seconds * 1.02,
                                            .stall_seconds = 0.001,
                                            .hbm_peak = 58_MiB,
                                            .ddr_peak = 2_MiB});
  EXPECT_NEAR(error.step_share, 0.02, 1e-9);
  EXPECT_NEAR(error.stall_seconds, 0.001, 1e-12);
  EXPECT_EQ(error.hbm_bytes, -static_cast<std::int64_t>((1_MiB).count()));
  EXPECT_EQ(error.ddr_bytes, static_cast<std::int64_t>((2_MiB).count()));
}

// Measured once more, as every job is when its device has become warm.
DriftWatch warm_watch() {
  DriftWatch watch;
  while (!watch.drifted()) watch.add(1, 0);
  watch.measured_again();
  return watch;
}

TEST(Drift, AsksOnceWhenTheDeviceIsWarm) {
  DriftWatch watch;
  int steps = 0;
  for (; !watch.drifted() && steps < 100; ++steps) {
    watch.add(1, 0);
    if (steps % 4 == 3) watch.solved_again();  // plans come and go meanwhile
  }
  EXPECT_EQ(steps, 16);
  watch.measured_again();
  for (int i = 0; i < 1000; ++i) watch.add(1, 0);
  EXPECT_FALSE(watch.drifted());
}

TEST(Drift, AsksAfterALastingChangeAndMoreSeldomEachTime) {
  DriftWatch watch = warm_watch();
  const auto steps_until_asked = [&](double seconds) {
    for (int i = 1; i <= 100; ++i) {
      watch.add(seconds, 0);
      if (watch.drifted()) return i;
    }
    return -1;
  };
  for (int i = 0; i < 20; ++i) watch.add(1.0 + 0.05 * (i % 2), 0);
  watch.add(5, 0);
  EXPECT_FALSE(watch.drifted()) << "one odd step";
  watch.add(1, 0);
  EXPECT_EQ(steps_until_asked(1.2), 3);
  watch.measured_again();
  for (int i = 0; i < 3; ++i) watch.add(1, 0);
  EXPECT_EQ(steps_until_asked(0.8), 13) << "sixteen since the plan was made";
  watch.measured_again();
  EXPECT_EQ(steps_until_asked(0.8), -1) << "that is how long they take now";
}

TEST(Drift, StepsThatGoAnotherWayCountOnlyInARow) {
  DriftWatch watch;
  for (int i = 0; i < 12; ++i) {
    watch.add(1, 0);
    watch.add_deviated();
    watch.add_deviated();
    EXPECT_FALSE(watch.drifted()) << "two, and then one that goes as planned";
  }
  watch.add_deviated();
  EXPECT_TRUE(watch.drifted());
  watch.measured_again();
  for (int i = 0; i < 15; ++i) watch.add_deviated();
  EXPECT_FALSE(watch.drifted()) << "patience has doubled";
  watch.add_deviated();
  EXPECT_TRUE(watch.drifted());
}

TEST(Drift, TheReferenceIsOfStepsThatWentAsPlanned) {
  DriftWatch watch = warm_watch();
  for (int i = 0; i < 6; ++i) watch.add_deviated();
  for (int i = 0; i < 3; ++i) watch.add(1, 0);
  for (int i = 0; i < 8; ++i) watch.add(1.05, 0);
  EXPECT_FALSE(watch.drifted());
  for (int i = 0; i < 3; ++i) watch.add(1.2, 0);
  EXPECT_TRUE(watch.drifted());
}

TEST(Drift, LateRestoresAreCountedAgainstTheStepsTime) {
  DriftWatch watch;
  for (int i = 0; i < 10; ++i) watch.add(1, 0.004);
  EXPECT_FALSE(watch.often_late());
  for (int i = 0; i < 10; ++i) watch.add(1, 0.02);
  EXPECT_TRUE(watch.often_late());
  watch.solved_again();
  EXPECT_FALSE(watch.often_late());
}

TEST(Solver, ADdrLimitBinds) {
  Snapshot snapshot = make_snapshot(4, 4);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second = 1e12;
  snapshot.ddr_cache_limit = 3_MiB;
  EXPECT_EQ(solve(snapshot, Policy{}).ddr_bytes, 3_MiB);
}

TEST(Solver, RulesDecideBeforeDensity) {
  Snapshot snapshot = make_snapshot(2, 2);
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second = 1e12;
  snapshot.sites[0].rule = RuleAction::kDdr;
  snapshot.sites[1].rule = RuleAction::kDiscard;
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.placements[0], Placement::kDdr);
  EXPECT_EQ(plan.placements[1], Placement::kRecompute);
  EXPECT_EQ(plan.placements[2], Placement::kHbm);
}

TEST(Solver, ModesAreObeyed) {
  Snapshot snapshot = make_snapshot(2, 2);
  snapshot.sites[2].rule = RuleAction::kHbm;
  Policy policy;
  policy.swapcore.mode = SwapMode::kOff;
  EXPECT_EQ(solve(snapshot, policy).hbm_bytes, 0_B);
  policy.swapcore.mode = SwapMode::kRules;
  const Plan plan = solve(snapshot, policy);
  EXPECT_EQ(plan.hbm_bytes, 1_MiB) << "only what a rule names";
  EXPECT_EQ(plan.placements[2], Placement::kHbm);
}

TEST(Solver, OutputsNeverOfferedHaveNoPlace) {
  Snapshot snapshot = make_snapshot(1, 2);
  snapshot.sites[0].bytes = 0_B;
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.placements[0], Placement::kRecompute);
  EXPECT_EQ(plan.recomputed_sites, 0) << "what is never offered is not counted as computed again";
  EXPECT_EQ(plan.recompute_seconds, 0);
}

}  // namespace
}  // namespace terrace
