// Plans for pipelines' orders of moments and for several nodes of DDR.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "swapcore/plan/solver.hpp"

namespace terrace {
namespace {

using Phase = Moment::Phase;

// `layers` layers of `kinds` sites of a mebibyte and more.
Snapshot make_snapshot(int layers, int kinds) {
  Snapshot snapshot;
  for (int l = 0; l < layers; ++l) {
    snapshot.layers.push_back(
        {.forward_seconds = 0.01, .backward_seconds = 0.03, .forward_peak = 40_MiB, .backward_peak = 40_MiB});
    for (int k = 0; k < kinds; ++k) {
      const auto index = static_cast<std::uint32_t>(snapshot.sites.size());
      snapshot.sites.push_back({SiteId{index}, l, Bytes((1_MiB).count() * static_cast<unsigned>(k + 1)),
                                1e-3 * (k + 1), RuleAction::kAuto});
    }
  }
  snapshot.head = {
      .forward_seconds = 0.01, .backward_seconds = 0.01, .forward_peak = 40_MiB, .backward_peak = 40_MiB};
  snapshot.hbm_budget = 60_MiB;
  snapshot.hbm_cache_limit = 1_GiB;
  snapshot.ddr_cache_limit = 1_GiB;
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second =
      static_cast<double>((1_MiB).count()) * 3 / 0.01;
  return snapshot;
}

std::vector<int> all_of(int layers) {
  std::vector<int> all;
  for (int l = 0; l < layers; ++l) all.push_back(l);
  return all;
}
void forward(std::vector<Moment>& order, const std::vector<int>& layers, std::uint32_t micro_batch) {
  for (const int layer : layers) order.push_back({Phase::kForward, layer, micro_batch});
}
void backward(std::vector<Moment>& order, const std::vector<int>& layers, std::uint32_t micro_batch) {
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer)
    order.push_back({Phase::kBackward, *layer, micro_batch});
}
// One forward, one backward, behind as many forwards as there are stages after this one. The last stage has a
// head behind each forward.
std::vector<Moment> one_forward_one_backward(int layers, std::uint32_t micro_batches,
                                             std::uint32_t stages_after) {
  std::vector<Moment> order;
  const std::uint32_t ahead = std::min(micro_batches, stages_after);
  for (std::uint32_t m = 0; m < ahead; ++m) forward(order, all_of(layers), m);
  for (std::uint32_t m = 0; m < micro_batches; ++m) {
    if (m + ahead < micro_batches) forward(order, all_of(layers), m + ahead);
    if (stages_after == 0) order.push_back({Phase::kHead, 0, m});
    backward(order, all_of(layers), m);
  }
  return order;
}
// Two parts of the model on one stage: the first half of the layers and the second take turns.
std::vector<Moment> interleaved(int layers, std::uint32_t micro_batches) {
  std::vector<int> first, second;
  for (int l = 0; l < layers; ++l) (l < layers / 2 ? first : second).push_back(l);
  std::vector<Moment> order;
  for (std::uint32_t m = 0; m + 1 < micro_batches; m += 2) {
    for (const auto& part : {first, second})
      for (const std::uint32_t batch : {m, m + 1}) forward(order, part, batch);
    for (const auto& part : {second, first})
      for (const std::uint32_t batch : {m, m + 1}) backward(order, part, batch);
  }
  return order;
}

// Walks through the moments as a session would, by the plan's lists alone.
class Walk {
 public:
  Walk(const Snapshot& snapshot, const Plan& plan) : snapshot_(snapshot), plan_(plan) {}

  void check() {
    const auto& order = snapshot_.schedule;
    ASSERT_EQ(plan_.prediction.hbm.size(), order.size());
    for (std::size_t m = 0; m < order.size(); ++m) {
      for (const SiteKey& key : plan_.departures[m]) EXPECT_EQ(in_hbm_.erase(key), 1U) << "at " << m;
      for (const SiteKey& key : plan_.restores[m]) {
        EXPECT_TRUE(in_ddr_.contains(key)) << "not forward yet, or back already";
        EXPECT_TRUE(in_hbm_.insert(key).second) << "it has not left";
      }
      if (order[m].phase == Phase::kForward) each_site(order[m], [this](const SiteKey& key) { enters(key); });
      if (order[m].phase == Phase::kBackward) each_site(order[m], [this](const SiteKey& key) { ends(key); });
      check_limits(m);
    }
    EXPECT_TRUE(in_hbm_.empty());
    EXPECT_TRUE(in_ddr_.empty());
  }

 private:
  template <typename Each>
  void each_site(const Moment& moment, Each each) {
    for (const SiteCost& site : snapshot_.sites)
      if (site.layer == moment.layer) each(SiteKey{site.site, moment.micro_batch});
  }
  void enters(const SiteKey& key) {
    const Placement placement = plan_.placements[key.site.index];
    if (placement == Placement::kRecompute) return;
    in_hbm_.insert(key);
    if (placement == Placement::kDdr) in_ddr_.insert(key);
  }
  void ends(const SiteKey& key) {
    const Placement placement = plan_.placements[key.site.index];
    if (placement == Placement::kRecompute) return;
    EXPECT_EQ(in_hbm_.erase(key), 1U) << "it is there when it is asked for";
    in_ddr_.erase(key);
  }
  void check_limits(std::size_t moment) {
    Bytes held, kept;
    for (const SiteKey& key : in_hbm_) {
      held += snapshot_.sites[key.site.index].bytes;
      if (plan_.placements[key.site.index] == Placement::kHbm) kept += snapshot_.sites[key.site.index].bytes;
    }
    EXPECT_LE(40_MiB + held, snapshot_.hbm_budget) << "at " << moment;
    EXPECT_LE(kept, snapshot_.hbm_cache_limit);
    std::map<int, Bytes> by_node;
    Bytes ddr;
    for (const SiteKey& key : in_ddr_) {
      by_node[plan_.nodes[key.site.index]] += snapshot_.sites[key.site.index].bytes;
      ddr += snapshot_.sites[key.site.index].bytes;
    }
    EXPECT_LE(ddr, snapshot_.ddr_cache_limit);
    for (const DdrNode& node : snapshot_.ddr_nodes) EXPECT_LE(by_node[node.node], node.limit);
  }

  const Snapshot& snapshot_;
  const Plan& plan_;
  std::set<SiteKey> in_hbm_, in_ddr_;
};

TEST(PlanOrder, OneMicroBatchAfterTheOtherIsTheOrderThatNeedsNoSchedule) {
  Snapshot snapshot = make_snapshot(6, 3);
  const Plan implied = solve(snapshot, Policy{});
  ASSERT_GT(implied.ddr_sites, 0);
  snapshot.schedule = one_forward_one_backward(6, 1, 0);
  const Plan named = solve(snapshot, Policy{});
  EXPECT_EQ(named.placements, implied.placements);
  EXPECT_EQ(named.restores, implied.restores);
  EXPECT_EQ(named.departures, implied.departures);
  EXPECT_NEAR(named.prediction.step_seconds, implied.prediction.step_seconds, 1e-12);
  EXPECT_EQ(named.prediction.hbm, implied.prediction.hbm);
}

// Three stages behind: four micro-batches are between forward and backward at once, and each holds its own.
TEST(PlanOrder, WhatIsInFlightHoldsMemoryForEachMicroBatch) {
  Snapshot snapshot = make_snapshot(2, 1);
  snapshot.d2h_bytes_per_second = 0;
  snapshot.hbm_budget = 44_MiB;
  snapshot.schedule = one_forward_one_backward(2, 8, 0);
  EXPECT_EQ(solve(snapshot, Policy{}).hbm_sites, 2);
  snapshot.schedule = one_forward_one_backward(2, 8, 3);
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.hbm_sites, 1) << "four of a mebibyte";
  Walk(snapshot, plan).check();
  EXPECT_NEAR(plan.prediction.step_seconds, 8 * (2 * 0.01 + 2 * 0.03 - 0.001), 1e-9);
}

TEST(PlanOrder, PipelinesOrdersKeepEveryLimit) {
  int travelled = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    const int layers = 2 + static_cast<int>(random() % 6);
    Snapshot snapshot = make_snapshot(layers, 1 + static_cast<int>(random() % 3));
    const std::uint32_t micro_batches = 2 + 2 * static_cast<std::uint32_t>(random() % 4);
    snapshot.schedule = random() % 2 == 0 ? interleaved(layers, micro_batches)
                                          : one_forward_one_backward(layers, micro_batches,
                                                                     static_cast<unsigned>(random() % 4));
    snapshot.hbm_budget = 40_MiB + Bytes(random() % (30ULL << 20));
    snapshot.hbm_cache_limit = Bytes(random() % (30ULL << 20));
    if (random() % 2 == 0)
      snapshot.ddr_nodes = {{1, Bytes(random() % (20ULL << 20))}, {0, Bytes(random() % (20ULL << 20))}};
    const Plan plan = solve(snapshot, Policy{});
    travelled += plan.ddr_sites > 0 ? 1 : 0;
    Walk(snapshot, plan).check();
    if (HasFailure()) FAIL() << "seed " << seed;
  }
  EXPECT_GT(travelled, 20);
}

TEST(PlanNodes, EachOutputLiesWholeOnANodeWithRoom) {
  Snapshot snapshot = make_snapshot(8, 1);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.ddr_cache_limit = 3_MiB;
  EXPECT_EQ(solve(snapshot, Policy{}).ddr_sites, 3);
  snapshot.ddr_nodes = {{0, Bytes(3 << 19)}, {1, Bytes(3 << 19)}};
  const Plan plan = solve(snapshot, Policy{});
  EXPECT_EQ(plan.ddr_sites, 2) << "one and a half each";
  EXPECT_EQ(std::count(plan.nodes.begin(), plan.nodes.end(), 0), 1);
  EXPECT_EQ(std::count(plan.nodes.begin(), plan.nodes.end(), 1), 1);
}

TEST(PlanNodes, TheNearestIsFilledFirst) {
  Snapshot snapshot = make_snapshot(8, 1);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.ddr_nodes = {{3, 2_MiB}, {0, 1_GiB}};
  const Plan plan = solve(snapshot, Policy{});
  ASSERT_GT(plan.ddr_sites, 3);
  EXPECT_EQ(std::count(plan.nodes.begin(), plan.nodes.end(), 3), 2);
  EXPECT_EQ(std::count(plan.nodes.begin(), plan.nodes.end(), 0), plan.ddr_sites - 2);
  snapshot.ddr_nodes.clear();
  const auto none = solve(snapshot, Policy{}).nodes;
  EXPECT_EQ(std::count(none.begin(), none.end(), -1), 8);
}

TEST(PlanOrder, WhatTravelsPackedTakesTheLinkAndDdrOfItsOwnSize) {
  Snapshot snapshot = make_snapshot(8, 1);
  snapshot.hbm_cache_limit = 0_B;
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second =
      static_cast<double>((1_MiB).count()) * 0.4 / 0.01;
  const Plan exact = solve(snapshot, Policy{});
  for (SiteCost& site : snapshot.sites) site.travel_bytes = 512_KiB;
  const Plan packed = solve(snapshot, Policy{});
  EXPECT_GT(packed.ddr_sites, exact.ddr_sites);
  EXPECT_EQ(packed.ddr_bytes.count(), (512_KiB).count() * static_cast<unsigned>(packed.ddr_sites));
  EXPECT_EQ(packed.prediction.ddr_peak, packed.ddr_bytes);
  Bytes moved;
  for (const Prediction::Window& window : packed.prediction.windows) moved += window.in;
  EXPECT_EQ(moved, packed.ddr_bytes);
}

}  // namespace
}  // namespace terrace
