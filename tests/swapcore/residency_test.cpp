#include "swapcore/residency.hpp"

#include <gtest/gtest.h>

#include <array>
#include <thread>

#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

constexpr EntryKey key(int layer, EntryKey::What what = EntryKey::What::kOutput) {
  return {0, layer, what, 0};
}

// Whether anybody had to wait for it is the machine's affair.
void let_it_leave(Tiers& tiers, const EntryKey& entry) {
  while (tiers.store->state(entry) == Residency::kLeaving) (void)tiers.store->wait_for_a_spill();
  ASSERT_EQ(tiers.store->state(entry), Residency::kInDdr);
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
  const auto held = [&](KeptState state) {
    const auto all = tiers.store->bytes_by_state();
    const auto& outputs = all[static_cast<std::size_t>(EntryKey::What::kOutput)];
    return std::pair(outputs.hbm[static_cast<std::size_t>(state)],
                     outputs.ddr[static_cast<std::size_t>(state)]);
  };
  EXPECT_EQ(held(KeptState::kLeaving), std::pair(3_MiB, 3_MiB)) << "in both tiers until it has left";
  let_it_leave(tiers, key(0));
  EXPECT_EQ(held(KeptState::kLeaving), std::pair(0_B, 0_B));
  EXPECT_EQ(held(KeptState::kSettled), std::pair(0_B, 3_MiB));
  EXPECT_EQ(tiers.hbm->usage().live, 0_B);
  EXPECT_EQ(tiers.ddr->usage().live, 3_MiB);
  ASSERT_TRUE(tiers.store->restore(key(0)));
  auto taken = tiers.store->take(key(0));
  ASSERT_TRUE(taken);
  EXPECT_TRUE(tiers.holds(taken->block, 42));
  EXPECT_EQ(tiers.store->spilled(), 3_MiB);
  EXPECT_EQ(tiers.store->restored(), 3_MiB);
}

// 4 MiB at 20 MB/s: the host is through long before the copy is.
TEST(Residency, WhatDepartsGivesItsHbmAwayBeforeTheHostHasSeenItLeave) {
  Tiers tiers({.hbm = 6_MiB, .link_bytes_per_second = 20e6, .copies = {.chunk = 256_KiB, .window = 512_KiB}});
  tiers.store->keep(key(0), tiers.filled(4_MiB, 42));
  ASSERT_TRUE(tiers.store->spill(key(0)));
  EXPECT_EQ(tiers.filled(4_MiB, 1), nullptr) << "no room while it is leaving";
  ASSERT_TRUE(tiers.store->depart(key(0)));
  EXPECT_EQ(tiers.store->state(key(0)), Residency::kInDdr);
  EXPECT_EQ(tiers.store->hbm_bytes(), 0_B);
  BlockRef other = tiers.filled(4_MiB, 1);
  ASSERT_NE(other, nullptr);
  EXPECT_TRUE(tiers.holds(other, 1));
  other.reset();
  auto taken = tiers.store->take(key(0));
  ASSERT_TRUE(taken);
  EXPECT_TRUE(tiers.holds(taken->block, 42)) << "nothing was written over it on its way";
  const auto waits = tiers.store->collect_waits();
  ASSERT_FALSE(waits.empty());
  EXPECT_EQ(waits[0].direction, Direction::kD2H);
  EXPECT_GT(waits[0].seconds, 0);
}

// Its host block is written until the copy has ended, whoever wants the bytes.
TEST(Residency, WhatDepartedMayBeDroppedOnItsWay) {
  for (const bool asked_back : {false, true}) {
    Tiers tiers({.link_bytes_per_second = 20e6, .copies = {.chunk = 256_KiB, .window = 512_KiB}});
    tiers.store->keep(key(0), tiers.filled(2_MiB, 42));
    ASSERT_TRUE(tiers.store->spill(key(0)));
    ASSERT_TRUE(tiers.store->depart(key(0)));
    if (asked_back) {
      ASSERT_TRUE(tiers.store->restore(key(0)));
    }
    tiers.store->drop(key(0));
    EXPECT_EQ(tiers.ddr->usage().live, 2_MiB) << "the spill is still under way";
    while (tiers.ddr->usage().live > 0_B) ASSERT_TRUE(tiers.store->wait_for_a_spill().ok());
    EXPECT_EQ(tiers.hbm->usage().live, 0_B);
  }
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
  let_it_leave(tiers, key(3));
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
  let_it_leave(tiers, key(0));
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
    let_it_leave(tiers, key(1, what));
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

// Copies go out 64 KiB at a time, two at once: the third piece is sent, and here refused, after submit().
const CopyEngine::Options kSmallChunks{.chunk = 64_KiB, .window = 128_KiB};
constexpr FaultPlan kThirdPieceFails = fail_call(FaultPoint::kDeviceCopy, 3);

TEST(Residency, ASpillThatFailsOnItsWayLeavesTheEntryInHbm) {
  for (const bool waited_for : {false, true}) {
    Tiers tiers({.copies = kSmallChunks});
    tiers.store->keep(key(0), tiers.filled(1_MiB, 7));
    {
      const ScopedFaults faults(kThirdPieceFails);
      ASSERT_TRUE(tiers.store->spill(key(0)));
      if (waited_for) {
        const auto freed = tiers.store->wait_for_a_spill();
        EXPECT_FALSE(freed && *freed) << "its HBM is its own again";
      }
      while (tiers.store->state(key(0)) == Residency::kLeaving) tiers.store->poll();
    }
    EXPECT_EQ(tiers.store->state(key(0)), Residency::kInHbm);
    EXPECT_EQ(tiers.store->hbm_bytes(), 1_MiB);
    EXPECT_EQ(tiers.ddr->usage().live, 0_B);
    auto taken = tiers.store->take(key(0));
    ASSERT_TRUE(taken);
    EXPECT_TRUE(tiers.holds(taken->block, 7));
  }
}

TEST(Residency, ARestoreThatFailsOnItsWayLeavesTheEntryInDdr) {
  for (const bool waited_for : {false, true}) {
    Tiers tiers({.copies = kSmallChunks});
    tiers.store->keep(key(0), tiers.filled(1_MiB, 6));
    ASSERT_TRUE(tiers.store->spill(key(0)));
    let_it_leave(tiers, key(0));
    {
      const ScopedFaults faults(kThirdPieceFails);
      ASSERT_TRUE(tiers.store->restore(key(0)));
      while (!waited_for && !faults.fired()) std::this_thread::yield();
      const auto refused = tiers.store->take(key(0));
      if (!refused) {
        EXPECT_EQ(refused.error().code, Errc::kIo);
      } else {  // the failure was noticed before: this is the second journey already
        EXPECT_TRUE(tiers.holds(refused->block, 6));
        continue;
      }
    }
    auto taken = tiers.store->take(key(0));
    while (!taken) taken = tiers.store->take(key(0));
    EXPECT_TRUE(tiers.holds(taken->block, 6));
    EXPECT_EQ(tiers.store->restored(), 2_MiB);
  }
}

TEST(Residency, WhatIsDroppedBeforeItLeftStays) {
  Tiers tiers({.link_bytes_per_second = 50e6, .copies = kSmallChunks});
  tiers.store->keep(key(0), tiers.filled(4_MiB, 1));
  ASSERT_TRUE(tiers.store->spill(key(0)));
  tiers.store->drop(key(0));
  EXPECT_EQ(tiers.copies->held_back(Direction::kD2H), 0_B);
  EXPECT_EQ(tiers.ddr->usage().live, 0_B);
}

TEST(Residency, DroppingWhatIsInFlightFreesBothSides) {
  Tiers tiers({.link_bytes_per_second = 50e6});
  tiers.store->keep(key(0), tiers.filled(1_MiB, 1));
  ASSERT_TRUE(tiers.store->spill(key(0)));
  tiers.store->drop(key(0));
  EXPECT_EQ(tiers.hbm->usage().live, 0_B);
  EXPECT_EQ(tiers.ddr->usage().live, 0_B);
}

// Who still reads what was let go reads the pattern, and nothing that looks right.
TEST(Residency, ReleasedActivationsAreOverwrittenWherePoisonIsOn) {
  for (const Poison poison : {Poison::kOff, Poison::kOn}) {
    for (const Pool pool : {Pool::kActivation, Pool::kWeights}) {
      Tiers tiers({});
      const auto neighbour = tiers.filled(4_KiB, 1);  // the memory stays mapped
      const auto room = tiers.hbm->allocate(tiers.compute, 4_KiB, pool);
      ASSERT_TRUE(room);
      BlockRef block = shared_block(*tiers.device, *tiers.hbm, tiers.compute, *room, poison);
      ASSERT_TRUE(tiers.device->fill(tiers.compute, block->address, 42, block->size));
      const Address stale = block->address;
      block.reset();
      std::array<int, 2> seen{};
      ASSERT_TRUE(tiers.device->launch_host(tiers.compute, [&seen, stale] {
        seen = {std::to_integer<int>(stale[0]), std::to_integer<int>(stale[4095])};
      }));
      ASSERT_TRUE(tiers.device->synchronize(tiers.compute));
      const int expected = poison == Poison::kOn && pool == Pool::kActivation ? kPoisonByte : 42;
      EXPECT_EQ(seen, (std::array<int, 2>{expected, expected}));
    }
  }
}

// What left has its HBM overwritten only behind the copy, what came back only behind its last use.
TEST(Residency, PoisonTouchesNoByteThatIsStillNeeded) {
  Tiers tiers({.link_bytes_per_second = 100e6, .copies = kSmallChunks, .poison = Poison::kOn});
  for (int round = 0; round < 3; ++round) {
    const auto room = tiers.hbm->allocate(tiers.compute, 1_MiB, Pool::kActivation);
    ASSERT_TRUE(room);
    BlockRef block = shared_block(*tiers.device, *tiers.hbm, tiers.compute, *room, Poison::kOn);
    ASSERT_TRUE(tiers.device->fill(tiers.compute, block->address, 42, block->size));
    tiers.store->keep(key(0), std::move(block));
    ASSERT_TRUE(tiers.store->spill(key(0)));
    ASSERT_TRUE(tiers.store->depart(key(0)));
    auto taken = tiers.store->take(key(0));
    ASSERT_TRUE(taken);
    EXPECT_TRUE(tiers.holds(taken->block, 42));
  }
}

}  // namespace
}  // namespace terrace
