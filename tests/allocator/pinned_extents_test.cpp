#include "allocator/pinned_extents.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class PinnedExtentsTest : public testing::Test {
 protected:
  PinnedExtents make(Bytes budget, Bytes least_slab = 1_MiB) {
    lease_ = std::make_shared<HostLease>(budget);
    return {*device_, {.lease = lease_, .least_slab = least_slab}};
  }
  std::unique_ptr<EmulatedDevice> device_ = std::move(EmulatedDevice::create({.capacity = 1_MiB})).value();
  std::shared_ptr<HostLease> lease_;
};

TEST_F(PinnedExtentsTest, TheSameBytesComeBackWithoutPinning) {
  auto extents = make(64_MiB);
  const auto pinned = [] { return metrics().value<Metric::kPinnedBytes>(); };
  const std::uint64_t before = pinned();
  const Address first = *extents.take(700_KiB);
  EXPECT_EQ(Bytes(pinned() - before), extents.mapped());
  extents.give(first, 700_KiB);
  ScopedFaults no_more(fail_call(1));
  EXPECT_EQ(*extents.take(700_KiB), first);
  EXPECT_FALSE(no_more.fired());
  extents.give(first, 700_KiB);
}

TEST_F(PinnedExtentsTest, FreedRangesJoinWhenALargerOneIsWanted) {
  auto extents = make(1_MiB);
  std::vector<Address> quarters;
  for (int i = 0; i < 4; ++i) quarters.push_back(*extents.take(256_KiB));
  EXPECT_EQ(extents.take(4_KiB).error().code, Errc::kOutOfBudget);
  for (const Address quarter : quarters) extents.give(quarter, 256_KiB);
  const auto whole = extents.take(1_MiB);
  ASSERT_TRUE(whole);
  extents.give(*whole, 1_MiB);
}

TEST_F(PinnedExtentsTest, FreeSlabsTooSmallMakeWayForALargeRange) {
  auto extents = make(4_MiB);
  std::vector<Address> held;
  for (int i = 0; i < 4; ++i) held.push_back(*extents.take(1_MiB));
  for (std::size_t i = 0; i < 3; ++i) extents.give(held[i], 1_MiB);
  EXPECT_EQ(extents.take(4_MiB).error().code, Errc::kOutOfBudget);
  EXPECT_EQ(extents.mapped(), 4_MiB) << "a refusal gives nothing up";
  const auto large = extents.take(3_MiB);
  ASSERT_TRUE(large);
  EXPECT_EQ(extents.mapped(), 4_MiB);
  EXPECT_EQ(device_->pinned_bytes(), 4_MiB);
  extents.give(*large, 3_MiB);
  extents.give(held[3], 1_MiB);
}

TEST_F(PinnedExtentsTest, WhatIsPinnedAheadIsAShareOfWhatIsMapped) {
  auto extents = make(256_MiB);
  const Address large = *extents.take(64_MiB);
  EXPECT_EQ(extents.mapped(), 64_MiB);
  const Address small = *extents.take(4_KiB);
  EXPECT_EQ(extents.mapped(), 72_MiB);
  extents.give(small, 4_KiB);
  extents.give(large, 64_MiB);
}

TEST_F(PinnedExtentsTest, WhereGrowingAheadIsRefusedWhatIsNeededStillComes) {
  auto extents = make(64_MiB, 8_MiB);
  ScopedFaults faults(fail_call(FaultPoint::kDevicePin, 1));
  const auto taken = extents.take(1_MiB);
  EXPECT_TRUE(faults.fired());
  ASSERT_TRUE(taken);
  EXPECT_EQ(extents.mapped(), 1_MiB);
  EXPECT_EQ(lease_->held(), 1_MiB);
  extents.give(*taken, 1_MiB);
}

TEST_F(PinnedExtentsTest, TrimGivesBackSlabsThatAreWhollyFree) {
  auto extents = make(64_MiB);
  const Address a = *extents.take(1_MiB);
  const Address b = *extents.take(1_MiB);
  extents.give(a, 1_MiB);
  EXPECT_EQ(extents.trim(PinnedExtents::Until::kBudgetIsKept), 0_B) << "the budget is kept already";
  EXPECT_EQ(extents.trim(PinnedExtents::Until::kNothingIsFree), 1_MiB);
  EXPECT_EQ(device_->pinned_bytes(), 1_MiB);
  EXPECT_EQ(lease_->held(), 1_MiB);
  EXPECT_FALSE(extents.contains(a));
  EXPECT_TRUE(extents.contains(b + 4096));
  EXPECT_EQ(extents.mapped_peak(), 2_MiB);
  extents.reset_peak();
  EXPECT_EQ(extents.mapped_peak(), 1_MiB);
  extents.give(b, 1_MiB);
}

TEST_F(PinnedExtentsTest, RefusedHugePagesAreCountedAndSaidOnce) {
  lease_ = std::make_shared<HostLease>(64_MiB);
  std::vector<std::string> said;
  PinnedExtents extents(*device_, {.lease = lease_,
                                   .least_slab = 1_MiB,  // no whole number of 2 MiB pages for what is asked
                                   .slab = {.huge_pages = HugePages::kExplicit},
                                   .say = [&](std::string_view line) { said.emplace_back(line); }});
  const auto counted = [] { return metrics().value<Metric::kFaults>(FaultPoint::kHostMap); };
  const auto before = counted();
  const Address a = *extents.take(3_MiB);
  const Address b = *extents.take(3_MiB);
  EXPECT_EQ(counted() - before, 2U);
  EXPECT_THAT(said, ElementsAre(HasSubstr("vm.nr_hugepages")));
  extents.give(a, 3_MiB);
  extents.give(b, 3_MiB);
}

TEST_F(PinnedExtentsTest, ManyThreadsTakeAndGive) {
  auto extents = make(24_MiB);
  std::atomic<int> overlaps{0};
  {
    std::vector<std::jthread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (unsigned i = 0; i < 2000; ++i) {
          const Bytes span((1 + (i * 7 + t) % 300) * 4096);
          const auto taken = extents.take(span);
          if (!taken) continue;
          auto& first = *reinterpret_cast<unsigned*>(*taken);
          auto& last = *reinterpret_cast<unsigned*>(*taken + span.count() - sizeof(unsigned));
          first = last = t;
          if (i % 64 == 0) extents.trim(PinnedExtents::Until::kNothingIsFree);
          if (first != t || last != t) ++overlaps;
          extents.give(*taken, span);
        }
      });
    }
  }
  EXPECT_EQ(overlaps, 0);
  extents.trim(PinnedExtents::Until::kNothingIsFree);
  EXPECT_EQ(lease_->held(), 0_B);
  EXPECT_EQ(device_->pinned_bytes(), 0_B);
}

}  // namespace
}  // namespace terrace
