#include "daemon/lease_account.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

using Time = LeaseAccount::Time;
using What = LeaseEvent::What;

constexpr LeaseAccount::Manners kManners{.patience = Time(100), .retry_after = Time(10)};
constexpr ClientId kOne{1}, kTwo{2}, kThree{3};

class LeaseAccountTest : public testing::Test {
 protected:
  std::vector<LeaseEvent> settle(Time now = Time(0)) {
    std::vector<LeaseEvent> events;
    account_.settle(now, events);
    return events;
  }
  Bytes keep(ClientId client, Bytes wanted, Time now = Time(0)) {
    return account_.request(client, wanted, Unmet::kKeep, now);
  }
  LeaseAccount account_{TierId::kHbm, 100_B, kManners};
};

TEST_F(LeaseAccountTest, WhoHoldsTooMuchIsAskedAndWhoWaitsGetsIt) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(keep(kOne, 100_B), 100_B);
  EXPECT_EQ(keep(kTwo, 80_B), 0_B);
  EXPECT_TRUE(account_.coming());
  auto events = settle();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].what, What::kShrink);
  EXPECT_EQ(events[0].client, kOne);
  EXPECT_EQ(events[0].bytes, 50_B);
  EXPECT_TRUE(settle().empty()) << "one is asked once";
  EXPECT_EQ(account_.leased(kTwo), 0_B) << "what is not answered is not granted";
  EXPECT_EQ(account_.answer(kOne, events[0].ask, 50_B, Time(1)), 50_B);
  events = settle(Time(1));
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].what, What::kGrant);
  EXPECT_EQ(events[0].client, kTwo);
  EXPECT_EQ(events[0].bytes, 50_B);
  EXPECT_FALSE(events[0].coming);
  EXPECT_FALSE(account_.due());
  account_.leave(kTwo);
  events = settle(Time(2));
  ASSERT_EQ(events.size(), 1U) << "what the first gave back it waited for";
  EXPECT_EQ(events[0].client, kOne);
  EXPECT_EQ(events[0].bytes, 50_B);
}

TEST_F(LeaseAccountTest, AKeptRequestOfNothingWithdrawsWhatIsWaitedFor) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(keep(kOne, 100_B), 100_B);
  EXPECT_EQ(keep(kTwo, 30_B), 0_B);
  const auto asked = settle();
  ASSERT_EQ(asked.size(), 1U);
  EXPECT_EQ(keep(kTwo, 0_B), 0_B);
  EXPECT_EQ(account_.waiting(kTwo), 0_B);
  EXPECT_EQ(account_.answer(kOne, asked[0].ask, 30_B, Time(1)), 30_B);
  for (const LeaseEvent& event : settle(Time(1)))
    EXPECT_NE(event.client, kTwo) << "nobody waits there any more";
  EXPECT_EQ(account_.leased(kTwo), 0_B);
}

// What is waited for is added up over clients and jobs.
TEST_F(LeaseAccountTest, WhoAsksForMoreThanThereCouldBeTakesNothingFromOthers) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  account_.enter(kThree, "b", 0_B);
  EXPECT_EQ(keep(kOne, Bytes(UINT64_MAX)), 100_B);
  EXPECT_EQ(keep(kTwo, Bytes(UINT64_MAX)), 0_B);
  EXPECT_EQ(keep(kThree, Bytes(UINT64_MAX)), 0_B);
  std::vector<LeaseEvent> events = settle();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].client, kOne);
  EXPECT_EQ(events[0].bytes, 50_B);
  EXPECT_EQ(account_.answer(kOne, events[0].ask, 50_B, Time(1)), 50_B);
  (void)settle(Time(1));
  EXPECT_EQ(account_.leased(kTwo), 25_B);
  EXPECT_EQ(account_.leased(kThree), 25_B);
}

TEST_F(LeaseAccountTest, WhatIsWithheldIsNobodysShare) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(keep(kOne, 40_B), 40_B);
  account_.withhold(60_B);
  EXPECT_EQ(keep(kTwo, 50_B), 0_B);
  auto events = settle();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].bytes, 20_B) << "half of what can be used";
  account_.withhold(10_B);
  events = settle();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].what, What::kGrant);
  EXPECT_EQ(events[0].bytes, 50_B) << "there is enough for both again";
  account_.withhold(1000_B);
  EXPECT_EQ(account_.withheld(), 10_B) << "what is leased is not withheld";
}

TEST_F(LeaseAccountTest, ARequestThatIsNotKeptMovesNobody) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(account_.request(kOne, 90_B, Unmet::kForget, Time(0)), 90_B);
  EXPECT_EQ(account_.request(kTwo, 80_B, Unmet::kForget, Time(0)), 10_B);
  EXPECT_TRUE(settle().empty());
  EXPECT_EQ(account_.waiting(kTwo), 0_B);
}

TEST_F(LeaseAccountTest, ADeafClientKeepsWhatItHoldsAndIsReportedOnce) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  (void)keep(kOne, 100_B);
  (void)keep(kTwo, 100_B);
  const auto ask = settle().at(0).ask;
  ASSERT_EQ(account_.due(), Time(100));
  EXPECT_TRUE(settle(Time(99)).empty());
  auto events = settle(Time(100));
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].what, What::kDeaf);
  EXPECT_EQ(events[0].client, kOne);
  EXPECT_EQ(events[1].what, What::kGrant) << "who waits is told that nothing comes";
  EXPECT_EQ(events[1].bytes, 0_B);
  EXPECT_TRUE(account_.deaf(kOne));
  EXPECT_EQ(account_.leased(kOne), 100_B);
  EXPECT_TRUE(settle(Time(100000)).empty());
  // A late answer counts, and it is asked like everybody again.
  EXPECT_EQ(account_.answer(kOne, ask, 20_B, Time(100000)), 20_B);
  EXPECT_FALSE(account_.deaf(kOne));
  events = settle(Time(100000));
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].bytes, 20_B);
  EXPECT_EQ(events[1].what, What::kShrink);
  EXPECT_EQ(events[1].bytes, 50_B);
}

TEST_F(LeaseAccountTest, ADeafClientIsGrantedItsGuaranteeAndNoMore) {
  account_.set_terms("a", {.weight = 1, .guarantee = 40_B});
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  account_.enter(kThree, "b", 0_B);
  EXPECT_EQ(keep(kOne, 20_B), 20_B);
  EXPECT_EQ(keep(kTwo, 100_B), 60_B) << "the guarantee is set aside";
  account_.set_budget(70_B);  // somebody is asked
  (void)settle();
  (void)settle(Time(100));
  ASSERT_TRUE(account_.deaf(kTwo));
  account_.set_budget(100_B);
  EXPECT_EQ(account_.request(kTwo, 10_B, Unmet::kForget, Time(100)), 0_B);
  EXPECT_EQ(account_.request(kOne, 20_B, Unmet::kForget, Time(100)), 20_B);
}

TEST_F(LeaseAccountTest, WhoNeedsWhatItHoldsIsAskedAgainAfterAWhile) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  (void)keep(kOne, 100_B);
  (void)keep(kTwo, 100_B);
  const auto ask = settle().at(0).ask;
  EXPECT_EQ(account_.answer(kOne, ask, 10_B, Time(5)), 10_B);
  auto events = settle(Time(5));
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].bytes, 10_B);
  EXPECT_FALSE(events[0].coming);
  ASSERT_EQ(account_.due(), Time(15));
  EXPECT_TRUE(settle(Time(14)).empty());
  events = settle(Time(15));
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].what, What::kShrink);
  EXPECT_EQ(events[0].bytes, 50_B);
}

TEST_F(LeaseAccountTest, NobodyIsAskedBelowItsGuaranteeAndPrioritiesCount) {
  account_.set_terms("a", {.weight = 1, .guarantee = 60_B});
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(keep(kOne, 100_B), 100_B);
  EXPECT_EQ(keep(kTwo, 100_B), 0_B);
  EXPECT_EQ(settle().at(0).bytes, 60_B);
  account_.set_terms("a", {.weight = 3, .guarantee = 0_B});
  account_.leave(kTwo);
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(account_.answer(kOne, 1, 0_B, Time(0)), 0_B);
  (void)settle(Time(50));
  (void)keep(kTwo, 100_B, Time(50));
  EXPECT_EQ(settle(Time(50)).at(0).bytes, 75_B);
}

TEST_F(LeaseAccountTest, AGuaranteeThatIsNotMetYetIsLeftAlone) {
  account_.set_terms("a", {.weight = 1, .guarantee = 30_B});
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(account_.request(kTwo, 90_B, Unmet::kForget, Time(0)), 90_B) << "of a job that is not here";
  EXPECT_EQ(account_.release(kTwo, 80_B), 80_B);
  account_.enter(kOne, "a", 0_B);
  EXPECT_EQ(account_.request(kTwo, 90_B, Unmet::kForget, Time(0)), 60_B);
  EXPECT_EQ(account_.request(kOne, 50_B, Unmet::kForget, Time(0)), 30_B);
}

TEST_F(LeaseAccountTest, ALoweredBudgetIsTakenBackByAsking) {
  account_.enter(kOne, "a", 0_B);
  account_.enter(kTwo, "b", 0_B);
  EXPECT_EQ(keep(kOne, 60_B), 60_B);
  EXPECT_EQ(keep(kTwo, 40_B), 40_B);
  account_.set_budget(50_B);
  const auto events = settle();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].bytes, 25_B);
  EXPECT_EQ(events[1].bytes, 25_B);
  EXPECT_EQ(account_.request(kOne, 1_B, Unmet::kForget, Time(0)), 0_B);
}

TEST_F(LeaseAccountTest, HoldingsAboveTheBudgetAreEnteredAndNothingIsGranted) {
  account_.enter(kOne, "a", 70_B);
  account_.enter(kTwo, "a", 500_B);
  EXPECT_EQ(account_.leased(), 170_B);
  EXPECT_EQ(account_.request(kOne, 1_B, Unmet::kForget, Time(0)), 0_B);
  EXPECT_EQ(settle().size(), 2U) << "both are asked down to their halves";
}

}  // namespace
}  // namespace terrace
