#include "allocator/host_handle_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class HostHandlePoolTest : public testing::Test {
 protected:
  Result<std::unique_ptr<HostHandlePool>> make(Bytes budget, std::vector<int> nodes = {0, 1}) {
    lease_ = std::make_shared<HostLease>(budget);
    return HostHandlePool::create(*device_, {.lease = lease_, .nodes = std::move(nodes), .chunk = 1_MiB});
  }
  void expect_nothing_left() const {
    EXPECT_EQ(device_->live_host_physical(), 0_B);
    EXPECT_EQ(device_->reserved_bytes(), 0_B);
    EXPECT_EQ(device_->mapped_bytes(), 0_B);
    EXPECT_EQ(lease_->held(), 0_B);
  }
  std::unique_ptr<EmulatedDevice> device_ =
      std::move(EmulatedDevice::create({.capacity = 1_MiB, .numa_nodes = 2})).value();
  std::shared_ptr<HostLease> lease_;
};

TEST_F(HostHandlePoolTest, OnlyNodesThatWorkAreAskedAndInTurn) {
  {
    const auto pool = std::move(make(64_MiB, {5, 1, 0})).value();
    EXPECT_THAT(pool->nodes(), ElementsAre(1, 0));
    const std::uint64_t pinned = metrics().value<Metric::kPinnedBytes>();
    const auto a = *pool->take(1_B);
    EXPECT_EQ(Bytes(metrics().value<Metric::kPinnedBytes>() - pinned), a.size);
    const auto b = *pool->take(1_MiB);
    EXPECT_EQ(a.size, 1_MiB);
    EXPECT_NE(a.node, b.node);
    EXPECT_EQ(pool->usage().live, 2_MiB);
    EXPECT_TRUE(pool->give_back(a).ok());
    EXPECT_TRUE(pool->give_back(b).ok());
  }
  expect_nothing_left();
}

TEST_F(HostHandlePoolTest, WhereNoNodeWorksItSaysSo) {
  const auto pool = make(64_MiB, {5, 7});
  ASSERT_FALSE(pool);
  EXPECT_EQ(pool.error().code, Errc::kNotSupported);
  EXPECT_THAT(pool.error().text, HasSubstr("NUMA node 7"));
  EXPECT_EQ(make(64_MiB, {}).error().code, Errc::kNotSupported);
  EXPECT_EQ(make(0_B).error().code, Errc::kOutOfBudget);
  expect_nothing_left();
}

TEST_F(HostHandlePoolTest, AHandleCanBeMappedAndBothSidesReachIt) {
  const auto pool = std::move(make(64_MiB)).value();
  const auto handle = *pool->take(3_MiB);
  const Address at = *device_->reserve(handle.size);
  ASSERT_TRUE(device_->map(at, handle.physical, handle.size).ok());
  at[0] = std::byte{9};
  EXPECT_EQ(at[0], std::byte{9});
  ASSERT_TRUE(device_->unmap(at, handle.size).ok());
  device_->release(at, handle.size);
  EXPECT_TRUE(pool->give_back(handle).ok());
}

TEST_F(HostHandlePoolTest, FreedHandlesAreReusedAndGivenUpForOthers) {
  const auto pool = std::move(make(8_MiB)).value();
  const auto first = *pool->take(3_MiB);
  EXPECT_TRUE(pool->give_back(first).ok());
  {
    ScopedFaults no_more(fail_call(1));
    const auto again = *pool->take(3_MiB);
    EXPECT_EQ(again.physical, first.physical);
    EXPECT_FALSE(no_more.fired());
    EXPECT_TRUE(pool->give_back(again).ok());
  }
  const auto second = *pool->take(5_MiB);
  EXPECT_EQ(lease_->held(), 8_MiB);
  const auto third = *pool->take(2_MiB);  // the 3 MiB kept make way
  EXPECT_EQ(lease_->held(), 7_MiB);
  EXPECT_EQ(pool->take(2_MiB).error().code, Errc::kOutOfBudget);
  EXPECT_TRUE(pool->give_back(second).ok());
  EXPECT_TRUE(pool->give_back(third).ok());
  lease_->set_budget(6_MiB);
  EXPECT_EQ(pool->trim(HostHandlePool::Until::kBudgetIsKept), 5_MiB);
  EXPECT_EQ(pool->trim(HostHandlePool::Until::kNothingIsKept), 2_MiB);
  EXPECT_EQ(device_->live_host_physical(), 0_B);
}

TEST_F(HostHandlePoolTest, BadInputChangesNothing) {
  const auto pool = std::move(make(8_MiB)).value();
  EXPECT_EQ(pool->take(0_B).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(pool->take(Bytes(UINT64_MAX)).error().code, Errc::kOutOfBudget);
  const auto handle = *pool->take(1_MiB);
  EXPECT_TRUE(pool->give_back(handle).ok());
  for (const auto& wrong : {handle, HostHandlePool::Handle{Physical{999}, 1_MiB, 0}}) {
    const Status refused = pool->give_back(wrong);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
  }
  EXPECT_EQ(pool->usage().live, 0_B);
  EXPECT_EQ(pool->usage().held, 1_MiB);
}

TEST_F(HostHandlePoolTest, WhicheverCallFailsNothingIsLeft) {
  for (std::uint64_t nth = 1;; ++nth) {
    SCOPED_TRACE(nth);
    ScopedFaults faults(fail_call(nth));
    if (auto pool = make(8_MiB)) {
      std::vector<HostHandlePool::Handle> held;
      for (const Bytes size : {1_MiB, 3_MiB, 4_MiB, 2_MiB}) {
        if (auto handle = (*pool)->take(size)) held.push_back(*handle);
      }
      for (const auto& handle : held) EXPECT_TRUE((*pool)->give_back(handle).ok());
      EXPECT_EQ((*pool)->usage().live, 0_B);
      EXPECT_EQ((*pool)->usage().held, lease_->held());
    }
    expect_nothing_left();
    if (!faults.fired()) break;
    ASSERT_LT(nth, 100U);
  }
}

TEST_F(HostHandlePoolTest, RandomUseByThreadsKeepsTheBudget) {
  {
    const auto pool = std::move(make(16_MiB)).value();
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < 3; ++t) {
      threads.emplace_back([&pool, t] {
        std::mt19937 random(t);
        std::vector<HostHandlePool::Handle> held;
        for (int i = 0; i < 1500; ++i) {
          if (random() % 2 == 0) {
            if (auto handle = pool->take(Bytes(1 + random() % 4'000'000))) held.push_back(*handle);
          } else if (!held.empty()) {
            std::swap(held[random() % held.size()], held.back());
            EXPECT_TRUE(pool->give_back(held.back()).ok());
            held.pop_back();
          }
          if (random() % 100 == 0) pool->trim(HostHandlePool::Until::kNothingIsKept);
          EXPECT_LE(pool->usage().live, 16_MiB);
        }
        for (const auto& handle : held) EXPECT_TRUE(pool->give_back(handle).ok());
      });
    }
    threads.clear();
    EXPECT_EQ(pool->usage().live, 0_B);
    EXPECT_LE(lease_->held(), 16_MiB);
  }
  expect_nothing_left();
}

}  // namespace
}  // namespace terrace
