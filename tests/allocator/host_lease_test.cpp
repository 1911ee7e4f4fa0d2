#include "allocator/host_lease.hpp"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace terrace {
namespace {

TEST(HostLease, GrantsAsMuchAsThereIsRoomForInWholePages) {
  HostLease lease(10_MiB + 1_B);
  EXPECT_EQ(lease.charge({.least = 1_MiB, .most = 4_MiB}), 4_MiB);
  EXPECT_EQ(lease.charge({.least = 1_MiB, .most = 64_MiB}), 6_MiB);
  EXPECT_EQ(lease.held(), 10_MiB);
  EXPECT_EQ(lease.charge({.least = 4_KiB, .most = 1_MiB}), 0_B);
  EXPECT_EQ(lease.held(), 10_MiB) << "a refusal charges nothing";
}

TEST(HostLease, ALowerBudgetRefusesUntilWhatIsHeldFallsBelowIt) {
  HostLease lease(8_MiB);
  ASSERT_TRUE(lease.try_charge(8_MiB));
  lease.set_budget(5_MiB);
  EXPECT_EQ(lease.excess(), 3_MiB);
  EXPECT_EQ(lease.room(), 0_B);
  EXPECT_FALSE(lease.try_charge(4_KiB));
  lease.release(4_MiB);
  EXPECT_EQ(lease.excess(), 0_B);
  EXPECT_TRUE(lease.try_charge(1_MiB));
  EXPECT_FALSE(lease.try_charge(4_KiB));
}

TEST(HostLease, ThreadsNeverHoldMoreThanTheBudget) {
  HostLease lease(64_KiB);
  std::atomic<bool> exceeded{false};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 20'000; ++i) {
          const Bytes charged = lease.charge({.least = 4_KiB, .most = 24_KiB});
          if (lease.held() > 64_KiB) exceeded = true;
          if (charged > 0_B) lease.release(charged);
        }
      });
    }
  }
  EXPECT_FALSE(exceeded);
  EXPECT_EQ(lease.held(), 0_B);
}

}  // namespace
}  // namespace terrace
