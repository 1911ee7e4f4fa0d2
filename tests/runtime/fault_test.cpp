#include "runtime/fault.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

namespace terrace {
namespace {

TEST(Fault, NothingFailsWithoutAPlan) { EXPECT_FALSE(fault_point(FaultPoint::kDeviceCopy)); }

TEST(Fault, TheNthCallFailsOnce) {
  const ScopedFaults faults(fail_call(3));
  std::vector<bool> failed;
  for (int i = 0; i < 5; ++i) failed.push_back(fault_point(FaultPoint::kDeviceCopy));
  EXPECT_EQ(failed, (std::vector<bool>{false, false, true, false, false}));
  EXPECT_TRUE(faults.fired());
  EXPECT_EQ(faults.calls(), 5U);
}

TEST(Fault, OnePointAloneIsCounted) {
  const ScopedFaults faults(fail_call(FaultPoint::kDeviceMap, 2));
  EXPECT_FALSE(fault_point(FaultPoint::kDeviceMap));
  EXPECT_FALSE(fault_point(FaultPoint::kDeviceCopy));
  EXPECT_TRUE(fault_point(FaultPoint::kDeviceMap));
  EXPECT_EQ(faults.calls(), 2U);
}

TEST(Fault, FailsForEverWhenRepeated) {
  const ScopedFaults faults({.nth = 2, .only = {}, .repeat = std::numeric_limits<std::uint64_t>::max()});
  EXPECT_FALSE(fault_point(FaultPoint::kDeviceMap));
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(fault_point(FaultPoint::kDeviceMap));
}

TEST(Fault, APlanEndsWithItsScope) {
  {
    const ScopedFaults faults(fail_call(1));
    EXPECT_TRUE(fault_point(FaultPoint::kDevicePin));
  }
  EXPECT_FALSE(fault_point(FaultPoint::kDevicePin));
  const ScopedFaults counted({.nth = 0, .only = {}, .repeat = 1});
  EXPECT_FALSE(fault_point(FaultPoint::kDevicePin));
  EXPECT_EQ(counted.calls(), 1U);
  EXPECT_FALSE(counted.fired());
}

TEST(Fault, ExactlyOneOfManyThreadsFails) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 250;
  const ScopedFaults faults(fail_call(500));
  std::vector<int> failures(kThreads, 0);
  {
    std::vector<std::jthread> threads;
    for (int& mine : failures) {
      threads.emplace_back([&mine] {
        for (int call = 0; call < kCalls; ++call) mine += fault_point(FaultPoint::kDeviceCopy) ? 1 : 0;
      });
    }
  }
  int total = 0;
  for (const int mine : failures) total += mine;
  EXPECT_EQ(total, 1);
  EXPECT_EQ(faults.calls(), static_cast<std::uint64_t>(kThreads * kCalls));
}

TEST(Fault, NamesGoBothWays) {
  EXPECT_STREQ(name_of(FaultPoint::kDeviceCopy), "device.copy");
  EXPECT_EQ(fault_point_named("device.copy"), FaultPoint::kDeviceCopy);
  EXPECT_EQ(fault_point_named("file.rename"), FaultPoint::kFileRename);
  EXPECT_FALSE(fault_point_named("nowhere").has_value());
}

TEST(FaultDeathTest, TwoPlansAtOnceAreAProgrammerError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const ScopedFaults faults(fail_call(1));
  EXPECT_DEATH(ScopedFaults second(fail_call(1)), "one fault plan at a time");
}

}  // namespace
}  // namespace terrace
