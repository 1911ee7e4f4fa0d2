// One micro-batch worked out by hand: three layers of one site, a link that takes 8 s for 76 bytes at 95%.
#include "swapcore/plan/windows.hpp"

#include <gtest/gtest.h>

#include "swapcore/plan/prediction.hpp"

namespace terrace {
namespace {

constexpr Placement kAgain = Placement::kRecompute;
constexpr Placement kStays = Placement::kHbm;
constexpr Placement kGoes = Placement::kDdr;

// forward 10 s each from 0, head 30..40, backward 30 s each from 40; a site is 4 s, and ready 4 s into
// forward.
Snapshot three_layers() {
  Snapshot snapshot;
  for (int l = 0; l < 3; ++l) {
    snapshot.layers.push_back(
        {.forward_seconds = 10, .backward_seconds = 30, .forward_peak = 100_B, .backward_peak = 200_B});
    snapshot.sites.push_back({SiteId{static_cast<std::uint32_t>(l)}, l, 76_B, 4, RuleAction::kAuto});
  }
  snapshot.head = {
      .forward_seconds = 10, .backward_seconds = 10, .forward_peak = 150_B, .backward_peak = 150_B};
  snapshot.hbm_budget = 1000_B;
  snapshot.hbm_cache_limit = snapshot.ddr_cache_limit = 1000_B;
  snapshot.d2h_bytes_per_second = snapshot.h2d_bytes_per_second = 10;
  return snapshot;
}

TEST(Windows, NothingCachedIsTheMeasuredStep) {
  const Snapshot snapshot = three_layers();
  Windows windows(snapshot);
  const Timeline* timeline = windows.simulate({kAgain, kAgain, kAgain});
  ASSERT_NE(timeline, nullptr);
  EXPECT_DOUBLE_EQ(timeline->seconds, 130);
  EXPECT_EQ(timeline->hbm, (std::vector<Bytes>{100_B, 100_B, 100_B, 150_B, 200_B, 200_B, 200_B}));
}

TEST(Windows, ATripHoldsHbmUntilItsSpillEndsAndFromItsTriggerOn) {
  const Snapshot snapshot = three_layers();
  Windows windows(snapshot);
  const Timeline* timeline = windows.simulate({kGoes, kAgain, kStays});
  ASSERT_NE(timeline, nullptr);
  ASSERT_EQ(timeline->trips.size(), 1U);
  const Timeline::Trip& trip = timeline->trips[0];
  EXPECT_DOUBLE_EQ(trip.spill_start, 4);
  EXPECT_DOUBLE_EQ(trip.spill_end, 12) << "in the second layer's window";
  // Backward of layer 2 is 26 s (40..66), of layer 1 30 s (66..96): asked for at 96, submitted at 66.
  EXPECT_EQ(trip.trigger, 5U);
  EXPECT_DOUBLE_EQ(trip.restore_start, 66);
  EXPECT_DOUBLE_EQ(trip.restore_end, 74);
  EXPECT_DOUBLE_EQ(timeline->seconds, 122);
  EXPECT_EQ(timeline->stall_seconds, 0);
  EXPECT_EQ(timeline->ddr, 76_B);
  EXPECT_EQ(timeline->hbm, (std::vector<Bytes>{176_B, 176_B, 176_B, 226_B, 200_B, 276_B, 200_B}));

  const Prediction prediction = predict(snapshot, *timeline);
  EXPECT_EQ(prediction.windows[0].out + prediction.windows[1].out, 76_B);
  EXPECT_EQ(prediction.windows[0].out, 57_B) << "six of eight seconds";
  EXPECT_EQ(prediction.windows[5].in, 76_B);
  EXPECT_NEAR(prediction.windows[5].in_share, 76.0 / 300, 1e-9);
  EXPECT_EQ(prediction.hbm_peak, 276_B);
}

TEST(Windows, ASpillStartsWhenItsOutputWasSeenReady) {
  Snapshot snapshot = three_layers();
  snapshot.sites[0].ready_seconds = 7;
  Windows windows(snapshot);
  const Timeline* timeline = windows.simulate({kGoes, kAgain, kAgain});
  ASSERT_NE(timeline, nullptr);
  EXPECT_DOUBLE_EQ(timeline->trips[0].spill_start, 7);
}

// Declared behind another, seen ready before it: it leaves first, and is asked for first.
TEST(Windows, OutputsAreAskedForInTheOrderInWhichTheyWereSeenReady) {
  Snapshot snapshot = three_layers();
  snapshot.sites[0].ready_seconds = 8;
  snapshot.sites.push_back({SiteId{3}, 0, 10_B, 1, RuleAction::kAuto});
  snapshot.sites[3].ready_seconds = 2;
  Windows windows(snapshot);
  const Timeline* timeline = windows.simulate({kGoes, kAgain, kAgain, kGoes});
  ASSERT_NE(timeline, nullptr);
  ASSERT_EQ(timeline->trips.size(), 2U);
  EXPECT_EQ(timeline->trips[0].site, 3U);
  EXPECT_DOUBLE_EQ(timeline->trips[0].spill_start, 2);
  EXPECT_EQ(timeline->trips[1].site, 0U);
  EXPECT_GE(timeline->trips[1].trigger, timeline->trips[0].trigger);
}

// The last layer's output is ready at 24 and gone at 32, after the head began; asked for at 40.
TEST(Windows, AnOutputAskedBackBeforeItHasLeftIsRefused) {
  Snapshot snapshot = three_layers();
  EXPECT_EQ(Windows(snapshot).simulate({kAgain, kAgain, kGoes}), nullptr);
  snapshot.d2h_bytes_per_second = 20;  // gone at 28: back at 40 if submitted as the head begins
  Windows windows(snapshot);
  const Timeline* timeline = windows.simulate({kAgain, kAgain, kGoes});
  ASSERT_NE(timeline, nullptr);
  EXPECT_EQ(timeline->trips[0].trigger, 3U);
  EXPECT_EQ(timeline->stall_seconds, 0);
}

TEST(Windows, WhoComesLateIsWaitedFor) {
  Snapshot snapshot = three_layers();
  snapshot.d2h_bytes_per_second = 20;
  snapshot.h2d_bytes_per_second = 5;  // 16 s from 30 on: six after it is asked for
  Windows windows(snapshot);
  const Timeline* timeline = windows.simulate({kAgain, kAgain, kGoes});
  ASSERT_NE(timeline, nullptr);
  EXPECT_DOUBLE_EQ(timeline->stall_seconds, 6);
  EXPECT_DOUBLE_EQ(timeline->seconds, 130 - 4 + 6);
}

TEST(Windows, BothDirectionsAtOnceShareTheLink) {
  Snapshot snapshot = three_layers();
  snapshot.layers[1].forward_seconds = snapshot.layers[2].forward_seconds = 0;  // the head begins at 10
  snapshot.both_bytes_per_second = 10;
  Windows windows(snapshot);
  const Timeline* timeline = windows.simulate({kGoes, kAgain, kAgain});
  ASSERT_NE(timeline, nullptr);
  EXPECT_DOUBLE_EQ(timeline->trips[0].spill_end, 14) << "six seconds alone, then the rest at half the rate";
}

TEST(Windows, LimitsRefuse) {
  Snapshot snapshot = three_layers();
  snapshot.hbm_budget = 275_B;
  EXPECT_EQ(Windows(snapshot).simulate({kStays, kAgain, kAgain}), nullptr) << "276 in a backward";
  snapshot.hbm_budget = 276_B;
  EXPECT_NE(Windows(snapshot).simulate({kStays, kAgain, kAgain}), nullptr);
  snapshot.hbm_cache_limit = 75_B;
  EXPECT_EQ(Windows(snapshot).simulate({kStays, kAgain, kAgain}), nullptr);
  snapshot.ddr_cache_limit = 75_B;
  EXPECT_EQ(Windows(snapshot).simulate({kGoes, kAgain, kAgain}), nullptr);
}

}  // namespace
}  // namespace terrace
