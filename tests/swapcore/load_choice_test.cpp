// By layer or by router: what each costs, where they cost the same, and that small differences change
// nothing.
#include "swapcore/streamed/load_choice.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

// 100 MB a pass over 1 GB/s: 100 ms beside 10 ms of forward and 20 ms of backward.
LoadCosts bound_by_link(double fired) {
  return {.forward_seconds = 0.010,
          .backward_seconds = 0.020,
          .asking_seconds = 0.001,
          .all = Bytes(100'000'000),
          .fired_share = fired,
          .bytes_per_second = 1e9};
}

TEST(LoadChoice, PredictsBothWays) {
  EXPECT_DOUBLE_EQ(predicted_seconds(bound_by_link(1), ExpertLoad::kLayer), 0.200);
  EXPECT_DOUBLE_EQ(predicted_seconds(bound_by_link(1), ExpertLoad::kRouter), 0.010 + 0.001 + 0.100 + 0.100);
  EXPECT_DOUBLE_EQ(predicted_seconds(bound_by_link(0.1), ExpertLoad::kRouter), 0.010 + 0.001 + 0.010 + 0.020);
}

TEST(LoadChoice, AtBreakEvenBothTakeAsLong) {
  for (const double rate : {0.4e9, 1e9, 3e9, 6e9}) {
    LoadCosts costs = bound_by_link(1);
    costs.bytes_per_second = rate;
    costs.fired_share = break_even_share(costs);
    ASSERT_GT(costs.fired_share, 0) << rate;
    ASSERT_LT(costs.fired_share, 1) << rate;
    EXPECT_NEAR(predicted_seconds(costs, ExpertLoad::kLayer), predicted_seconds(costs, ExpertLoad::kRouter),
                1e-9)
        << rate;
  }
  LoadCosts hidden = bound_by_link(0.01);
  hidden.bytes_per_second = 20e9;
  EXPECT_EQ(break_even_share(hidden), 0) << "what compute hides costs nothing";
  hidden.all = 0_B;
  EXPECT_EQ(break_even_share(hidden), 0);
  LoadCosts idle = bound_by_link(1);
  idle.forward_seconds = idle.backward_seconds = idle.asking_seconds = 0;
  EXPECT_EQ(break_even_share(idle), 1);
}

TEST(LoadChoice, ChangesForWhatIsWorthIt) {
  EXPECT_EQ(choose_load(bound_by_link(0.3), ExpertLoad::kLayer), ExpertLoad::kRouter);
  EXPECT_EQ(choose_load(bound_by_link(0.3), ExpertLoad::kRouter), ExpertLoad::kRouter);
  EXPECT_EQ(choose_load(bound_by_link(1), ExpertLoad::kRouter), ExpertLoad::kLayer);
  LoadCosts near = bound_by_link(1);
  near.fired_share = break_even_share(near);
  for (const ExpertLoad now : {ExpertLoad::kLayer, ExpertLoad::kRouter})
    EXPECT_EQ(choose_load(near, now), now);
}

}  // namespace
}  // namespace terrace
