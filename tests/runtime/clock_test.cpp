#include "runtime/clock.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(Clock, SteadyNeverGoesBack) {
  Nanoseconds last = steady_clock().now();
  for (int i = 0; i < 1000; ++i) {
    const Nanoseconds now = steady_clock().now();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Clock, ManualMovesOnlyWhenTold) {
  ManualClock manual;
  const Clock& clock = manual;
  const Nanoseconds start = clock.now();
  EXPECT_EQ(clock.now(), start);
  manual.advance(std::chrono::milliseconds(1500));
  EXPECT_EQ(seconds_of(clock.now() - start), 1.5);
}

TEST(ClockDeathTest, TimeNeverGoesBack) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ManualClock manual;
  EXPECT_DEATH(manual.advance(Nanoseconds(-1)), "time never goes back");
}

}  // namespace
}  // namespace terrace
