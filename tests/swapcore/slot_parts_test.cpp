// Blocks of which parts come and go by themselves, from home, from a copy kept in HBM or from a file: what is
// wanted is right, and what is not wanted does not cross the link.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "allocator/tiers/nvme_tier.hpp"
#include "runtime/fault.hpp"
#include "swapcore/streamed/slot_ring.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

using PartSet = SlotRing::PartSet;
constexpr Bytes kRange = 8_KiB;
constexpr Bytes kGap = 256_B;  // between the first ranges of all parts and the second ones
constexpr std::uint32_t kPartCount = 5;
constexpr Bytes kHalf = kRange * kPartCount;
constexpr Bytes kBlock = kHalf * 2 + kGap;
constexpr int kItems = 4;

enum class Cold : std::uint8_t { kNone, kLastParts };  // which parts live in a file

// Of each item part p holds p in its low bits, and how often it was renewed above them.
class Blocks {
 public:
  explicit Blocks(const TierOptions& options) : tiers(options) {
    user = *tiers.device->create_stream(StreamPriority::kNormal);
    renewed = *tiers.device->create_event();
  }
  ~Blocks() {
    ring.reset();
    (void)tiers.device->synchronize(user);
    kept.clear();
    for (const TierBlock& block : cold_blocks) (void)cold->free(block);
    cold.reset();
    for (const Block& home : homes) (void)tiers.ddr->free(home);
    tiers.device->destroy_event(renewed);
    tiers.device->destroy_stream(user);
  }

  [[nodiscard]] Status open(int slots, Cold where = Cold::kNone) {
    if (where != Cold::kNone) {
      auto made =
          NvmeTier::create(*tiers.device, *tiers.ddr, *tiers.copies,
                           {.folder = ::testing::TempDir(), .size = 2_MiB, .piece = 4_KiB, .pieces = 4});
      if (!made) return made.error();
      cold = std::move(made).value();
    }
    std::vector<BlockRef> blocks;
    for (int i = 0; i < slots; ++i) {
      BlockRef slot = tiers.filled(kBlock, 0xEE);
      if (slot == nullptr) return Error{Errc::kOutOfMemory, "no slot", {}, {}};
      blocks.push_back(std::move(slot));
    }
    auto made = SlotRing::create({.device = *tiers.device,
                                  .copies = *tiers.copies,
                                  .allocated_on = tiers.compute,
                                  .user = user,
                                  .reason = CopyReason::kExpert,
                                  .cold = cold.get()},
                                 std::move(blocks));
    if (!made) return made.error();
    ring = std::move(made).value();
    for (int item = 0; item < kItems; ++item) {
      if (Status added = add(item, where); !added) return added;
    }
    return {};
  }

  [[nodiscard]] Status add(int item, Cold where) {
    auto home = tiers.ddr->allocate(kBlock, Pool::kExpert);
    if (!home) return home.error();
    homes.push_back(*home);
    std::vector<SlotRing::PartRange> ranges;
    for (const Bytes base : {0_B, kHalf + kGap}) {
      for (std::uint32_t part = 0; part < kPartCount; ++part) {
        const Bytes at = base + kRange * part;
        ranges.push_back({part, at, kRange, home->address + at.count()});
      }
    }
    versions.emplace_back(kPartCount, std::uint8_t{0});
    write_home(item);
    items.push_back(ring->add_block(kBlock, ranges));
    wanted.emplace_back(kPartCount, true);
    kept.push_back(tiers.filled(kRange * 2 * 2, 0xDD));
    if (kept.back() == nullptr) return Error{Errc::kOutOfMemory, "no place", {}, {}};
    if (Status there = tiers.device->synchronize(tiers.compute); !there) return there;
    return where == Cold::kNone ? Status() : move_to_file(item);
  }

  // The last two parts; what is left of them at home is wrong.
  [[nodiscard]] Status move_to_file(int item) {
    for (std::uint32_t part = kPartCount - 2; part < kPartCount; ++part) {
      std::vector<TierBlock> there;
      const BlockRef from = tiers.filled(kRange, value(item, part));
      if (from == nullptr) return Error{Errc::kOutOfMemory, "no room", {}, {}};
      if (Status ready = tiers.device->synchronize(tiers.compute); !ready) return ready;
      for (const Bytes base : {0_B, kHalf + kGap}) {
        auto block = cold->allocate(kRange, Pool::kExpert);
        if (!block) return block.error();
        cold_blocks.push_back(*block);
        there.push_back(*block);
        auto stored = cold->store(*block, from->address, Event{});
        if (!stored) return stored.error();
        if (Status done = stored->synchronize(); !done) return done;
        std::memset(homes[at(item)].address + (base + kRange * part).count(), 0xBB, kRange.count());
      }
      ring->settle_on_tier(items[at(item)], part, there);
    }
    return {};
  }

  static std::size_t at(int item) { return static_cast<std::size_t>(item); }
  [[nodiscard]] std::uint8_t value(int item, std::uint32_t part) const {
    return static_cast<std::uint8_t>(versions[at(item)][part] * 32 + static_cast<unsigned>(item) * 8 + part);
  }
  void write_home(int item) {
    for (const Bytes base : {0_B, kHalf + kGap}) {
      for (std::uint32_t part = 0; part < kPartCount; ++part) {
        std::memset(homes[at(item)].address + (base + kRange * part).count(), value(item, part),
                    kRange.count());
      }
    }
  }

  // Others write the home, in order of the compute stream; no cold part then.
  [[nodiscard]] Status renew(int item) {
    if (Status idle = tiers.device->synchronize(user); !idle) return idle;
    if (Status idle = ring->drain(); !idle) return idle;
    for (auto& version : versions[at(item)]) version = static_cast<std::uint8_t>((version + 1) % 8);
    Status launched = tiers.device->launch_host(tiers.compute, [this, item] { write_home(item); });
    if (launched) launched = tiers.device->record(tiers.compute, renewed);
    if (launched) launched = tiers.device->synchronize(tiers.compute);
    ring->renew_behind(items[at(item)], renewed);
    return launched;
  }

  void want(int item, const PartSet& parts) {
    wanted[at(item)] = parts;
    ring->want(items[at(item)], parts);
  }
  // Place 0 or 1 of the item's two is given to the part.
  [[nodiscard]] Status keep(int item, int place, std::uint32_t part) {
    return ring->keep(items[at(item)], part, kept[at(item)]->address + (kRange * 2 * at(place)).count());
  }

  [[nodiscard]] Status use(int item) {
    auto block = ring->acquire(items[at(item)]);
    if (!block) return block.error();
    std::vector<std::pair<std::uint32_t, std::uint8_t>> expected;
    for (std::uint32_t part = 0; part < kPartCount; ++part) {
      if (wanted[at(item)][part]) expected.emplace_back(part, value(item, part));
    }
    Status launched = tiers.device->launch_host(user, [this, slot = block->front(), expected] {
      for (const auto& [part, byte] : expected) {
        for (const Bytes base : {0_B, kHalf + kGap}) {
          const Address range = slot + (base + kRange * part).count();
          for (std::uint64_t i = 0; i < kRange.count(); i += 31) wrong += range[i] != std::byte{byte};
        }
      }
    });
    const Status released = ring->release(items[at(item)], SlotRing::Use::kRead);
    return launched ? released : launched;
  }

  Tiers tiers;
  Stream user;
  Event renewed{};
  std::unique_ptr<NvmeTier> cold;
  std::vector<TierBlock> cold_blocks;
  std::unique_ptr<SlotRing> ring;
  std::vector<Block> homes;
  std::vector<BlockRef> kept;
  std::vector<SlotRing::ItemId> items;
  std::vector<PartSet> wanted;
  std::vector<std::vector<std::uint8_t>> versions;
  std::uint64_t wrong = 0;
};

PartSet parts(std::initializer_list<std::uint32_t> which) {
  PartSet set(kPartCount);
  for (const std::uint32_t part : which) set[part] = true;
  return set;
}

TEST(SlotParts, OnlyWhatIsWantedCrossesTheLink) {
  Blocks blocks({});
  ASSERT_TRUE(blocks.open(2));
  blocks.want(0, parts({1, 3}));
  ASSERT_TRUE(blocks.use(0));
  EXPECT_EQ(blocks.ring->counters().fetched, kRange * 4);
  blocks.want(0, parts({1, 2, 3}));
  ASSERT_TRUE(blocks.use(0));
  EXPECT_EQ(blocks.ring->counters().fetched, kRange * 6) << "what was there stays";
  blocks.want(0, parts({3}));
  ASSERT_TRUE(blocks.use(0));
  EXPECT_EQ(blocks.ring->counters().found, 1U);
  blocks.want(1, PartSet(kPartCount, true));
  ASSERT_TRUE(blocks.use(1));
  EXPECT_EQ(blocks.ring->counters().fetched, kRange * 6 + kBlock) << "side by side, one copy with its gap";
  blocks.want(2, parts({}));
  ASSERT_TRUE(blocks.use(2)) << "nothing wanted is had at once";
  ASSERT_TRUE(blocks.tiers.device->synchronize(blocks.user));
  EXPECT_EQ(blocks.wrong, 0U);
}

TEST(SlotParts, WhatIsKeptComesFromHbm) {
  Blocks blocks({});
  ASSERT_TRUE(blocks.open(1));
  ASSERT_TRUE(blocks.keep(0, 0, 1));
  ASSERT_TRUE(blocks.use(0));
  ASSERT_TRUE(blocks.use(1));
  const Bytes before = blocks.ring->counters().fetched;
  EXPECT_EQ(blocks.ring->counters().from_kept, 0_B) << "the first fetch makes the copy";
  ASSERT_TRUE(blocks.use(0));
  EXPECT_EQ(blocks.ring->counters().from_kept, kRange * 2);
  EXPECT_EQ(blocks.ring->counters().fetched - before, kBlock - kRange * 2);
  // The place goes to another part, while its old content may still be read.
  ASSERT_TRUE(blocks.ring->keep(blocks.items[0], 1, nullptr));
  ASSERT_TRUE(blocks.keep(0, 0, 2));
  for (const int item : {1, 0, 1, 0}) ASSERT_TRUE(blocks.use(item));
  EXPECT_EQ(blocks.ring->counters().from_kept, kRange * 4);
  // A copy of what others have renewed is none.
  ASSERT_TRUE(blocks.renew(0));
  EXPECT_EQ(blocks.ring->kept_at(blocks.items[0], 2), nullptr);
  ASSERT_TRUE(blocks.use(0));
  EXPECT_NE(blocks.ring->kept_at(blocks.items[0], 2), nullptr);
  ASSERT_TRUE(blocks.tiers.device->synchronize(blocks.user));
  EXPECT_EQ(blocks.wrong, 0U);
}

// Wants, places, renewals and prefetches that prove wrong.
Status random_schedule(Blocks& blocks, unsigned seed, Cold where) {
  std::mt19937 random(seed);
  for (int i = 0; i < 60; ++i) {
    const int item = static_cast<int>(random() % kItems);
    PartSet set(kPartCount);
    for (std::uint32_t part = 0; part < kPartCount; ++part) set[part] = random() % 3 != 0;
    blocks.want(item, set);
    if (random() % 4 == 0) {
      const auto part = static_cast<std::uint32_t>(random() % kPartCount);
      const int place = static_cast<int>(random() % 2);
      for (std::uint32_t other = 0; other < kPartCount; ++other) {
        if (Status left = blocks.ring->keep(blocks.items[Blocks::at(item)], other, nullptr); !left)
          return left;
      }
      if (Status kept = blocks.keep(item, place, part); !kept) return kept;
    }
    if (random() % 2 == 0) {
      std::vector<SlotRing::ItemId> next;
      for (unsigned n = random() % 4; n > 0; --n) next.push_back(blocks.items[random() % kItems]);
      if (Status expected = blocks.ring->expect(next); !expected) return expected;
    }
    if (random() % 8 == 0 && where == Cold::kNone) {
      if (Status renewed = blocks.renew(item); !renewed) return renewed;
    }
    if (Status used = blocks.use(item); !used) return used;
  }
  return blocks.ring->drain();
}

TEST(SlotParts, RandomSchedules) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const Cold where = seed % 3 == 0 ? Cold::kLastParts : Cold::kNone;
    Blocks blocks({.link_bytes_per_second = seed % 2 == 0 ? 4e9 : 100e6,
                   .copies = {.chunk = 16_KiB, .window = 32_KiB}});
    ASSERT_TRUE(blocks.open(1 + static_cast<int>(seed % 3), where));
    ASSERT_TRUE(random_schedule(blocks, seed, where)) << "seed " << seed;
    ASSERT_TRUE(blocks.tiers.device->synchronize(blocks.user));
    ASSERT_EQ(blocks.wrong, 0U) << "seed " << seed;
    EXPECT_EQ(blocks.ring->counters().from_tier > 0_B, where != Cold::kNone);
  }
}

TEST(SlotParts, LeakNothingWhicheverCallFails) {
  for (const Cold where : {Cold::kNone, Cold::kLastParts}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired; nth += 1 + nth / 10) {
      Blocks blocks({});  // the tiers themselves are not in question
      const ScopedFaults faults(fail_call(nth));
      Status status = blocks.open(2, where);
      if (status) status = random_schedule(blocks, static_cast<unsigned>(nth), where);
      fired = faults.fired();
      if (!status) {
        EXPECT_TRUE(fired) << status.error().text;
        continue;
      }
      EXPECT_TRUE(blocks.tiers.device->synchronize(blocks.user));
      EXPECT_EQ(blocks.wrong, 0U) << "call " << nth << " failed and nobody said so";
    }
  }
}

}  // namespace
}  // namespace terrace
