#include "swapcore/plan/residual.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

Prediction modelled(double seconds, double stall = 0) {
  Prediction prediction;
  prediction.step_seconds = seconds;
  prediction.stall_seconds = stall;
  return prediction;
}
Prediction::Measured took(double seconds, double stall = 0) {
  return {.step_seconds = seconds, .stall_seconds = stall, .hbm_peak = {}, .ddr_peak = {}};
}

TEST(Residual, ThreeStepsBehindTheFirstTell) {
  ResidualWatch watch;
  watch.begin(modelled(1.0, 0.01));
  EXPECT_FALSE(watch.add(took(9.0, 5))) << "it pinned memory";
  EXPECT_FALSE(watch.add(took(1.04, 0.02)));
  EXPECT_FALSE(watch.add(took(1.05, 0.03)));
  EXPECT_EQ(watch.corrected(modelled(1.0)).step_seconds, 1.0);
  EXPECT_TRUE(watch.add(took(3.0, 0.9))) << "an odd step is not the median";
  const Prediction corrected = watch.corrected(modelled(1.0, 0.01));
  EXPECT_NEAR(corrected.step_seconds, 1.05, 1e-12);
  EXPECT_NEAR(corrected.residual_share, 0.05, 1e-12);
  EXPECT_NEAR(corrected.stall_seconds, 0.03, 1e-12);
  EXPECT_FALSE(watch.add(took(1.2))) << "once for each plan";
  EXPECT_NEAR(watch.corrected(modelled(1.0)).step_seconds, 1.05, 1e-12);
}

TEST(Residual, TheNextPlanBeginsWithWhatTheLastOneTaught) {
  ResidualWatch watch;
  watch.begin(modelled(1.0, 0.2));
  for (int i = 0; i < 4; ++i) (void)watch.add(took(0.9, 0.1));
  watch.begin(modelled(2.0));
  EXPECT_NEAR(watch.corrected(modelled(2.0)).step_seconds, 1.8, 1e-12);
  EXPECT_EQ(watch.corrected(modelled(2.0)).stall_seconds, 0) << "no wait is shorter than none";
  for (int i = 0; i < 4; ++i) (void)watch.add(took(2.0));
  EXPECT_NEAR(watch.corrected(modelled(2.0)).step_seconds, 2.0, 1e-12) << "its own steps decide";
}

TEST(Residual, ThePlansErrorIsThatOfItsTypicalStep) {
  ResidualWatch watch;
  watch.begin(modelled(1.0));
  for (int i = 0; i < 4; ++i) (void)watch.add(took(1.0));
  (void)watch.add(took(1.02));
  (void)watch.add(took(1.03));
  Prediction::Measured last = took(1.5);
  last.hbm_peak = 7_MiB;
  EXPECT_NEAR(watch.typical(last).step_seconds, 1.03, 1e-12);
  EXPECT_EQ(watch.typical(last).hbm_peak, 7_MiB);
}

TEST(Residual, APlanOfNothingIsLeftAlone) {
  ResidualWatch watch;
  watch.begin(modelled(0));
  for (int i = 0; i < 8; ++i) EXPECT_FALSE(watch.add(took(1)));
  EXPECT_EQ(watch.corrected(modelled(0)).step_seconds, 0);
}

}  // namespace
}  // namespace terrace
