#include "runtime/assert.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(AssertDeath, AFailedCheckSaysWhereAndWhatWasPromised) {
  EXPECT_DEATH(TERRACE_CHECK(1 + 1 == 3, "sums are right"),
               "assert_test.cpp:[0-9]+: sums are right \\(1 \\+ 1 == 3\\)");
}

TEST(Assert, AConditionThatHoldsIsEvaluatedOnce) {
  int times = 0;
  TERRACE_CHECK(++times == 1, "evaluated once");
  EXPECT_EQ(times, 1);
}

}  // namespace
}  // namespace terrace
