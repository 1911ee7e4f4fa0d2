// Bytes that change while they are in DDR.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "swapcore/verifier.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

constexpr Bytes kSize = 1_MiB;

constexpr EntryKey key(int layer, EntryKey::What what = EntryKey::What::kOutput) {
  return {0, layer, what, 0};
}

// Where the next block of that size will lie: the pool gives what was freed last.
Address next_place(Tiers& tiers) {
  const auto block = tiers.ddr->allocate(kSize, Pool::kActivation);
  EXPECT_TRUE(block);
  EXPECT_TRUE(tiers.ddr->free(*block));
  return block->address;
}

// Puts an entry into DDR and gives the address of its bytes there.
Address in_ddr(Tiers& tiers, const EntryKey& entry, std::uint8_t value) {
  const Address place = next_place(tiers);
  tiers.store->keep(entry, tiers.filled(kSize, value));
  EXPECT_TRUE(tiers.store->spill(entry));
  while (tiers.store->state(entry) == Residency::kLeaving) (void)tiers.store->wait_for_a_spill();
  EXPECT_EQ(tiers.store->state(entry), Residency::kInDdr);
  EXPECT_EQ(std::to_integer<std::uint8_t>(place[kSize.count() - 1]), value) << "the block is where it was";
  return place;
}

// The first look happens beside the test, which must not change the bytes before it.
void let_it_look(Tiers& tiers, const EntryKey& entry) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!tiers.store->looked_at(entry)) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "nobody looks";
    std::this_thread::yield();
  }
}

TEST(ResidencyVerify, BytesThatStayAreHandedOut) {
  Tiers tiers({.verify = Verify::kAlways});
  for (int round = 0; round < 3; ++round) {
    (void)in_ddr(tiers, key(round), 40);
    ASSERT_TRUE(tiers.store->restore(key(round)));
    auto taken = tiers.store->take(key(round));
    ASSERT_TRUE(taken) << taken.error().text;
    EXPECT_TRUE(tiers.holds(taken->block, 40));
  }
  EXPECT_EQ(tiers.store->damaged(), 0U);
}

TEST(ResidencyVerify, AFlippedByteIsNeverHandedOut) {
  for (const auto what : {EntryKey::What::kOutput, EntryKey::What::kSaved}) {
    Tiers tiers({.verify = Verify::kAlways});
    const Address place = in_ddr(tiers, key(7, what), 41);
    let_it_look(tiers, key(7, what));
    place[12345] ^= std::byte{1};
    ASSERT_TRUE(tiers.store->restore(key(7, what)));
    const auto taken = tiers.store->take(key(7, what));
    ASSERT_FALSE(taken.ok());
    EXPECT_EQ(taken.error().code, Errc::kIo);
    EXPECT_THAT(taken.error().text, testing::HasSubstr("layer 7"));
    EXPECT_EQ(tiers.store->damaged(), 1U);
    EXPECT_FALSE(tiers.store->state(key(7, what)).has_value()) << "dropped";
    EXPECT_EQ(tiers.store->hbm_bytes(), 0_B);
  }
}

TEST(ResidencyVerify, ARestoreThatHasEndedKeepsItsVerdict) {
  Tiers tiers({.verify = Verify::kAlways});
  const Address place = in_ddr(tiers, key(2), 42);
  let_it_look(tiers, key(2));
  place[0] ^= std::byte{0x80};
  ASSERT_TRUE(tiers.store->restore(key(2)));
  while (tiers.store->state(key(2)) == Residency::kArriving) ASSERT_TRUE(tiers.store->restore(key(2)));
  ASSERT_EQ(tiers.store->state(key(2)), Residency::kInHbm);
  ASSERT_TRUE(tiers.store->spill(key(2))) << "another round must not make the bytes right";
  while (tiers.store->state(key(2)) == Residency::kLeaving) (void)tiers.store->wait_for_a_spill();
  EXPECT_EQ(tiers.store->take(key(2)).error().code, Errc::kIo);
}

TEST(ResidencyVerify, NothingIsLookedAtWhereItIsOff) {
  Tiers tiers({});
  const Address place = in_ddr(tiers, key(0), 43);
  place[5] ^= std::byte{1};
  ASSERT_TRUE(tiers.store->restore(key(0)));
  EXPECT_TRUE(tiers.store->take(key(0)).ok());
  EXPECT_EQ(tiers.store->damaged(), 0U);
}

TEST(ResidencyVerify, EntriesGoWhileTheyAreLookedAt) {
  Tiers tiers({.verify = Verify::kAlways});
  for (int round = 0; round < 50; ++round) {
    (void)in_ddr(tiers, key(round), 44);
    if (round % 2 == 0) {
      ASSERT_TRUE(tiers.store->restore(key(round)));
    }
    tiers.store->drop(key(round));
    tiers.store->poll();
  }
  EXPECT_EQ(tiers.store->damaged(), 0U);
}

TEST(Verifier, OneBlockInSixteenIsSampled) {
  const std::vector<std::byte> bytes(64);
  Verifier verifier(Verify::kSample);
  int looked_at = 0;
  constexpr int kBlocks = 16000;
  for (int i = 0; i < kBlocks; ++i) looked_at += verifier.arrived(bytes) != nullptr ? 1 : 0;
  EXPECT_NEAR(looked_at, kBlocks / 16, kBlocks / 160);
}

}  // namespace
}  // namespace terrace
