#include "swapcore/residency.hpp"

#include <gtest/gtest.h>

#include "runtime/fault.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

constexpr EntryKey key(int layer, EntryKey::What what = EntryKey::What::kOutput) {
  return {0, layer, what, 0};
}

TEST(Residency, WhatIsKeptComesBackAsItWas) {
  Tiers tiers({});
  const BlockRef block = tiers.filled(1_MiB, 7);
  const Address address = block->address;
  tiers.store->keep(key(0), block);
  EXPECT_EQ(tiers.store->hbm_bytes(), 1_MiB);
  auto taken = tiers.store->take(key(0));
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->block->address, address);
  EXPECT_FALSE(taken->waited);
  EXPECT_FALSE(tiers.store->state(key(0)).has_value()) << "consumed once";
  EXPECT_EQ(tiers.store->take(key(0)).error().code, Errc::kNotFound);
}

TEST(Residency, ASpilledEntryFreesHbmAndReturnsTheSameBytes) {
  Tiers tiers({});
  tiers.store->keep(key(0), tiers.filled(3_MiB, 42));
  ASSERT_TRUE(tiers.store->spill(key(0)));
  EXPECT_EQ(*tiers.store->state(key(0)), Residency::kLeaving);
  EXPECT_TRUE(tiers.store->wait_for_a_spill());
  EXPECT_EQ(*tiers.store->state(key(0)), Residency::kInDdr);
  EXPECT_EQ(tiers.hbm->usage().live, 0_B);
  EXPECT_EQ(tiers.ddr->usage().live, 3_MiB);
  ASSERT_TRUE(tiers.store->restore(key(0)));
  auto taken = tiers.store->take(key(0));
  ASSERT_TRUE(taken);
  EXPECT_TRUE(tiers.holds(taken->block, 42));
  EXPECT_EQ(tiers.store->spilled(), 3_MiB);
  EXPECT_EQ(tiers.store->restored(), 3_MiB);
}

TEST(Residency, ARestoreDuringTheSpillKeepsTheBytesInPlace) {
  Tiers tiers({.link_bytes_per_second = 50e6});
  tiers.store->keep(key(0), tiers.filled(2_MiB, 9));
  ASSERT_TRUE(tiers.store->spill(key(0)));
  ASSERT_TRUE(tiers.store->restore(key(0)));
  EXPECT_EQ(*tiers.store->state(key(0)), Residency::kInHbm);
  auto taken = tiers.store->take(key(0));
  ASSERT_TRUE(taken);
  EXPECT_TRUE(tiers.holds(taken->block, 9));
  EXPECT_EQ(tiers.store->restored(), 0_B) << "nothing had to move";
}

TEST(Residency, TakingWhatIsStillOnItsWayWaitsAndIsMeasured) {
  Tiers tiers({.link_bytes_per_second = 50e6});
  tiers.store->keep(key(3), tiers.filled(1_MiB, 5));
  ASSERT_TRUE(tiers.store->spill(key(3)));
  ASSERT_TRUE(tiers.store->wait_for_a_spill());
  ASSERT_TRUE(tiers.store->restore(key(3)));
  auto taken = tiers.store->take(key(3));
  ASSERT_TRUE(taken);
  EXPECT_TRUE(taken->waited);
  EXPECT_TRUE(tiers.holds(taken->block, 5));
  const auto waits = tiers.store->collect_waits();
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_TRUE(waits[0].late);
  EXPECT_GT(waits[0].seconds, 0);
  EXPECT_EQ(waits[0].key.layer, 3);
}

TEST(Residency, TheFarthestUseIsTheLowestLayer) {
  Tiers tiers({});
  tiers.store->keep(key(2), tiers.filled(1_KiB, 1));
  tiers.store->keep(key(1), tiers.filled(1_KiB, 1));
  tiers.store->keep(key(0, EntryKey::What::kSaved), tiers.filled(1_KiB, 1));
  EXPECT_EQ(tiers.store->farthest_in_hbm(EntryKey::What::kOutput)->layer, 1);
  EXPECT_EQ(tiers.store->farthest_in_hbm(EntryKey::What::kSaved)->layer, 0);
  EXPECT_EQ(tiers.store->hbm_bytes(EntryKey::What::kSaved), 1_KiB);
  tiers.store->drop_all(EntryKey::What::kOutput);
  EXPECT_FALSE(tiers.store->farthest_in_hbm(EntryKey::What::kOutput).has_value());
  EXPECT_EQ(tiers.store->hbm_bytes(), 1_KiB);
}

TEST(Residency, AFullDdrLeavesTheEntryInHbm) {
  Tiers tiers({.ddr = 1_MiB});
  tiers.store->keep(key(0), tiers.filled(2_MiB, 3));
  EXPECT_EQ(tiers.store->spill(key(0)).error().code, Errc::kOutOfBudget);
  EXPECT_EQ(*tiers.store->state(key(0)), Residency::kInHbm);
}

TEST(Residency, AFullHbmLeavesTheEntryInDdr) {
  Tiers tiers({.hbm = 2_MiB});
  tiers.store->keep(key(0), tiers.filled(2_MiB, 3));
  ASSERT_TRUE(tiers.store->spill(key(0)));
  ASSERT_TRUE(tiers.store->wait_for_a_spill());
  {
    const BlockRef other = tiers.filled(2_MiB, 4);
    EXPECT_EQ(tiers.store->take(key(0)).error().code, Errc::kOutOfBudget);
    EXPECT_EQ(*tiers.store->state(key(0)), Residency::kInDdr);
  }
  auto taken = tiers.store->take(key(0));
  ASSERT_TRUE(taken);
  EXPECT_TRUE(tiers.holds(taken->block, 3));
}

TEST(Residency, WhatWasRestoredAheadOfUseGivesItsHbmBack) {
  Tiers tiers({.hbm = 2_MiB});
  for (const auto what : {EntryKey::What::kSaved, EntryKey::What::kOutput}) {
    tiers.store->keep(key(1, what), tiers.filled(1_MiB, 8));
    ASSERT_TRUE(tiers.store->spill(key(1, what)));
    ASSERT_TRUE(tiers.store->wait_for_a_spill());
    ASSERT_TRUE(tiers.store->restore(key(1, what)));
    EXPECT_TRUE(tiers.store->undo_a_restore());
    EXPECT_FALSE(tiers.store->undo_a_restore());
    EXPECT_EQ(tiers.store->hbm_bytes(), 0_B);
    EXPECT_EQ(tiers.hbm->usage().live, 0_B);
  }
  EXPECT_FALSE(tiers.store->state(key(1)).has_value()) << "an output is computed again";
  auto saved = tiers.store->take(key(1, EntryKey::What::kSaved));
  ASSERT_TRUE(saved) << "a saved activation is in DDR still";
  EXPECT_TRUE(tiers.holds(saved->block, 8));
}

TEST(Residency, DroppingWhatIsInFlightFreesBothSides) {
  Tiers tiers({.link_bytes_per_second = 50e6});
  tiers.store->keep(key(0), tiers.filled(1_MiB, 1));
  ASSERT_TRUE(tiers.store->spill(key(0)));
  tiers.store->drop(key(0));
  EXPECT_EQ(tiers.hbm->usage().live, 0_B);
  EXPECT_EQ(tiers.ddr->usage().live, 0_B);
}

}  // namespace
}  // namespace terrace
