#include "swapcore/plan/solver.hpp"

#include <gtest/gtest.h>

#include <random>

namespace terrace {
namespace {

// `layers` layers of `per_layer` sites; site j of a layer has size and cost by j.
Snapshot make_snapshot(int layers, int per_layer) {
  Snapshot snapshot;
  for (int l = 0; l < layers; ++l) {
    snapshot.layers.push_back({.forward_seconds = 0.01, .backward_seconds = 0.03, .hbm_peak = 40_MiB});
    for (int j = 0; j < per_layer; ++j) {
      const auto index = static_cast<std::uint32_t>(snapshot.sites.size());
      snapshot.sites.push_back({SiteId{index}, l, 1_MiB, 1e-3 * (j + 1), RuleAction::kAuto});
    }
  }
  snapshot.head = {.forward_seconds = 0.01, .backward_seconds = 0.01, .hbm_peak = 50_MiB};
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
  Snapshot snapshot = make_snapshot(4, 4);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.d2h_bytes_per_second =  // one MiB in a window of 10 ms, and a little more
      static_cast<double>((1_MiB).count()) * 1.5 / 0.01;
  snapshot.h2d_bytes_per_second = snapshot.d2h_bytes_per_second;
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.hbm_bytes, 0_B);
  EXPECT_EQ(plan.ddr_bytes, 4_MiB) << "one output a layer";
  for (std::size_t i = 0; i < snapshot.sites.size(); ++i) {
    EXPECT_EQ(plan.placements[i], i % 4 == 3 ? Placement::kDdr : Placement::kRecompute) << i;
  }
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

// Whatever the numbers, at every position what is held stays under what is left there.
TEST(Solver, NeverExceedsALimit) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const int layers = 1 + static_cast<int>(random() % 12);
    Snapshot snapshot = make_snapshot(layers, 1 + static_cast<int>(random() % 8));
    for (SiteCost& site : snapshot.sites) {
      site.bytes = Bytes(random() % (4 << 20));
      site.recompute_seconds = 1e-6 * static_cast<double>(random() % 5000);
    }
    for (Position& position : snapshot.layers) position.hbm_peak = Bytes(random() % (60 << 20));
    snapshot.hbm_cache_limit = Bytes(random() % (60 << 20));
    snapshot.ddr_cache_limit = Bytes(random() % (60 << 20));
    snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second =
        1e6 * static_cast<double>(random() % 1000);
    const Plan plan = solve(snapshot, Policy{});

    EXPECT_LE(plan.hbm_bytes, snapshot.hbm_cache_limit);
    EXPECT_LE(plan.ddr_bytes, snapshot.ddr_cache_limit);
    for (int p = 1; p <= layers; ++p) {
      const auto at = static_cast<std::size_t>(p);
      Bytes held = p < layers ? snapshot.layers[at].hbm_peak : snapshot.head.hbm_peak;
      Bytes travelling;
      for (std::size_t i = 0; i < snapshot.sites.size(); ++i) {
        const SiteCost& site = snapshot.sites[i];
        if (plan.placements[i] == Placement::kHbm && site.layer < p) held += site.bytes;
        if (plan.placements[i] == Placement::kDdr && site.layer + 1 == p) travelling += site.bytes;
      }
      if (held + travelling > snapshot.hbm_budget) {
        EXPECT_EQ(travelling, 0_B) << "seed " << seed;
        EXPECT_GT(p < layers ? snapshot.layers[at].hbm_peak : snapshot.head.hbm_peak, snapshot.hbm_budget)
            << "seed " << seed;
      }
      const double window = p < layers ? snapshot.layers[at].forward_seconds : snapshot.head.forward_seconds;
      EXPECT_LE(static_cast<double>(travelling.count()), window * snapshot.d2h_bytes_per_second);
    }
  }
}

}  // namespace
}  // namespace terrace
