#include "swapcore/step_profile.hpp"

#include <gtest/gtest.h>

#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

using Phase = StepProfile::Phase;

TEST(StepProfile, TellsPositionsPeaksAndOutputs) {
  Tiers tiers({});
  const std::vector<SiteSpec> sites = {{"layer.0.a", SiteKind::kMatmul, 0, "a"},
                                       {"layer.1.a", SiteKind::kMatmul, 1, "a"},
                                       {"layer.1.b", SiteKind::kScan, 1, "b"}};
  StepProfile profile(*tiers.device, tiers.compute);
  profile.enter(Phase::kBegin, 0, 0_B);
  profile.enter(Phase::kForward, 0, 5_MiB);
  profile.add_output(SiteId{0}, {100_B, 100_B});
  profile.enter(Phase::kForward, 1, 10_MiB);
  profile.add_output(SiteId{1}, {200_B, 60_B});
  profile.enter(Phase::kHead, 0, 20_MiB);
  profile.enter(Phase::kBackward, 1, 30_MiB);
  profile.enter(Phase::kBackward, 0, 40_MiB);
  profile.enter(Phase::kEnd, 0, 15_MiB);
  ASSERT_TRUE(tiers.device->synchronize(tiers.compute));

  const Snapshot snapshot = profile.summarize(sites);
  ASSERT_EQ(snapshot.layers.size(), 2U);
  EXPECT_EQ(snapshot.layers[0].forward_peak, 10_MiB);
  EXPECT_EQ(snapshot.layers[0].backward_peak, 15_MiB);
  EXPECT_EQ(snapshot.layers[1].forward_peak, 20_MiB);
  EXPECT_EQ(snapshot.layers[1].backward_peak, 40_MiB);
  EXPECT_EQ(snapshot.head.forward_peak, 30_MiB);
  EXPECT_EQ(snapshot.head.backward_peak, 30_MiB);
  EXPECT_EQ(snapshot.other_peak, 5_MiB);
  EXPECT_GE(snapshot.other_seconds, 0);
  EXPECT_EQ(snapshot.micro_batches, 1);
  ASSERT_EQ(snapshot.sites.size(), 3U);
  EXPECT_EQ(snapshot.sites[1].bytes, 200_B);
  EXPECT_EQ(snapshot.sites[1].travel_bytes, 60_B);
  EXPECT_EQ(snapshot.sites[2].bytes, 0_B) << "never offered";
}

TEST(StepProfile, SitesOfAGroupShareTheirMeanCost) {
  Tiers tiers({.link_bytes_per_second = 100e6});
  const std::vector<SiteSpec> sites = {{"layer.0.a", SiteKind::kMatmul, 0, "a"},
                                       {"layer.1.a", SiteKind::kMatmul, 1, "a"},
                                       {"layer.1.b", SiteKind::kScan, 1, "b"}};
  StepProfile profile(*tiers.device, tiers.compute);
  const auto mark = [&] {
    const Event event = *tiers.device->create_event();
    EXPECT_TRUE(tiers.device->record(tiers.compute, event));
    return event;
  };
  const BlockRef block = tiers.filled(1_MiB, 1);
  const Event start = mark();
  EXPECT_TRUE(tiers.device->copy(tiers.compute, Direction::kH2D, block->address, block->address, 1_MiB));
  profile.add_run(SiteId{0}, start, mark());
  ASSERT_TRUE(tiers.device->synchronize(tiers.compute));
  const Snapshot snapshot = profile.summarize(sites);
  EXPECT_GT(snapshot.sites[0].recompute_seconds, 0);
  EXPECT_EQ(snapshot.sites[0].recompute_seconds, snapshot.sites[1].recompute_seconds);
  EXPECT_EQ(snapshot.sites[2].recompute_seconds, 0);
}

// The optimizer is no part of the first layer's backward, whose window and peak a plan uses.
TEST(StepProfile, TheUpdateIsOutsideOfEveryPosition) {
  Tiers tiers({.link_bytes_per_second = 100e6});
  const std::vector<SiteSpec> sites = {{"layer.0.a", SiteKind::kMatmul, 0, "a"}};
  StepProfile profile(*tiers.device, tiers.compute);
  const BlockRef block = tiers.filled(1_MiB, 1);
  profile.enter(Phase::kBegin, 0, 0_B);
  profile.enter(Phase::kForward, 0, 5_MiB);
  profile.enter(Phase::kHead, 0, 10_MiB);
  profile.enter(Phase::kBackward, 0, 20_MiB);
  profile.enter(Phase::kUpdate, 0, 30_MiB);
  EXPECT_TRUE(tiers.device->copy(tiers.compute, Direction::kH2D, block->address, block->address, 1_MiB));
  profile.enter(Phase::kEnd, 0, 50_MiB);
  ASSERT_TRUE(tiers.device->synchronize(tiers.compute));
  const Snapshot snapshot = profile.summarize(sites);
  EXPECT_EQ(snapshot.layers[0].backward_peak, 30_MiB);
  EXPECT_EQ(snapshot.other_peak, 50_MiB);
  EXPECT_GE(snapshot.other_seconds, 0.01) << "a mebibyte at 100 MB/s";
}

// A copy comes before the site, whose own run takes no time: its output is there behind both.
TEST(StepProfile, AnOutputIsReadyWhenItsRunInForwardEnds) {
  Tiers tiers({.link_bytes_per_second = 100e6});
  const std::vector<SiteSpec> sites = {{"layer.0.a", SiteKind::kMatmul, 0, "a"}};
  StepProfile profile(*tiers.device, tiers.compute);
  const BlockRef block = tiers.filled(1_MiB, 1);
  const auto run_behind_a_copy = [&] {
    EXPECT_TRUE(tiers.device->copy(tiers.compute, Direction::kH2D, block->address, block->address, 1_MiB));
    const Event start = *tiers.device->create_event();
    EXPECT_TRUE(tiers.device->record(tiers.compute, start));
    const Event end = *tiers.device->create_event();
    EXPECT_TRUE(tiers.device->record(tiers.compute, end));
    profile.add_run(SiteId{0}, start, end);
  };
  profile.enter(Phase::kForward, 0, 0_B);
  run_behind_a_copy();
  profile.enter(Phase::kHead, 0, 0_B);
  profile.enter(Phase::kBackward, 0, 0_B);
  run_behind_a_copy();
  run_behind_a_copy();  // of no account
  profile.enter(Phase::kEnd, 0, 0_B);
  ASSERT_TRUE(tiers.device->synchronize(tiers.compute));
  const Snapshot snapshot = profile.summarize(sites);
  EXPECT_GT(snapshot.sites[0].ready_seconds, snapshot.sites[0].recompute_seconds);
  EXPECT_LE(snapshot.sites[0].ready_seconds, snapshot.layers[0].forward_seconds);
}

TEST(StepProfile, SitesThatNobodyTimesShareTheirLayersForward) {
  Tiers tiers({.link_bytes_per_second = 100e6});
  const std::vector<SiteSpec> sites = {{"layer.0.a", SiteKind::kMatmul, 0, "a"},
                                       {"layer.0.b", SiteKind::kMatmul, 0, "b"},
                                       {"layer.0.c", SiteKind::kMatmul, 0, "c"}};
  StepProfile profile(*tiers.device, tiers.compute);
  const BlockRef block = tiers.filled(1_MiB, 1);
  profile.enter(Phase::kForward, 0, 0_B);
  EXPECT_TRUE(tiers.device->copy(tiers.compute, Direction::kH2D, block->address, block->address, 1_MiB));
  profile.add_output(SiteId{0}, {100_B, 100_B});
  profile.add_output(SiteId{1}, {300_B, 300_B});
  profile.enter(Phase::kHead, 0, 0_B);
  profile.enter(Phase::kEnd, 0, 0_B);
  ASSERT_TRUE(tiers.device->synchronize(tiers.compute));
  const Snapshot snapshot = profile.summarize(sites);
  const double forward = snapshot.layers[0].forward_seconds;
  EXPECT_GT(forward, 0);
  EXPECT_DOUBLE_EQ(snapshot.sites[0].recompute_seconds, forward / 4);
  EXPECT_DOUBLE_EQ(snapshot.sites[1].recompute_seconds, forward * 3 / 4);
  EXPECT_EQ(snapshot.sites[2].recompute_seconds, 0) << "never offered";
}

}  // namespace
}  // namespace terrace
