// Items that live in DDR and are worked on in slots: what the user leaves in them is what it finds again, in
// any order of use, with any call failing, and both sides of the link are given back (the fixture checks).
#include "swapcore/streamed/slot_ring.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

using ItemId = SlotRing::ItemId;
constexpr Bytes kPiece = 40_KiB;

struct RingOptions {
  int slots = 3;
  int items = 6;
  TierOptions tiers{};
};

// Items of two pieces: the first travels both ways, the second only in.
class Ring {
 public:
  explicit Ring(const RingOptions& options) : tiers(options.tiers) {
    user = *tiers.device->create_stream(StreamPriority::kNormal);
  }
  [[nodiscard]] Status open(const RingOptions& options) {
    std::vector<BlockRef> slots;
    for (int i = 0; i < options.slots; ++i) {
      BlockRef slot = tiers.filled(2 * kPiece, 0xEE);
      if (slot == nullptr) return Error{Errc::kOutOfMemory, "no slot", {}, {}};
      slots.push_back(std::move(slot));
    }
    auto made = SlotRing::create({.device = *tiers.device,
                                  .copies = *tiers.copies,
                                  .allocated_on = tiers.compute,
                                  .user = user,
                                  .reason = CopyReason::kOptimizer},
                                 std::move(slots));
    if (!made) return made.error();
    ring = std::move(made).value();
    for (int i = 0; i < options.items; ++i) {
      for (const Pool pool : {Pool::kOptimizer, Pool::kGradient}) {
        auto home = tiers.ddr->allocate(kPiece, pool);
        if (!home) return home.error();
        std::memset(home->address, pool == Pool::kOptimizer ? 0 : i, kPiece.count());
        homes.push_back(*home);
      }
      ids.push_back(ring->add({{homes.end()[-2].address, kPiece, SlotRing::Flow::kBoth},
                               {homes.end()[-1].address, kPiece, SlotRing::Flow::kIn}}));
      expected.push_back(0);
    }
    return {};
  }
  ~Ring() {
    ring.reset();
    (void)tiers.device->synchronize(user);
    for (const Block& home : homes) (void)tiers.ddr->free(home);
    tiers.device->destroy_stream(user);
  }

  // Checks both pieces in order of the user's stream and, where asked, adds one to each byte of the first.
  [[nodiscard]] Status work_on(int item, SlotRing::Use use) {
    auto at = ring->acquire(ids[static_cast<std::size_t>(item)]);
    if (!at) return at.error();
    const bool writes = use == SlotRing::Use::kWritten;
    std::uint8_t& value = expected[static_cast<std::size_t>(item)];
    Status launched = tiers.device->launch_host(
        user, [this, first = (*at)[0], second = (*at)[1], was = value, item, writes] {
          for (std::uint64_t i = 0; i < kPiece.count(); ++i) {
            wrong += first[i] != std::byte{was} || second[i] != static_cast<std::byte>(item);
            if (writes) first[i] = static_cast<std::byte>(was + 1);
          }
        });
    if (launched && writes) ++value;
    const Status released = ring->release(ids[static_cast<std::size_t>(item)], use);
    return launched ? released : launched;
  }
  void expect_homes() {
    for (std::size_t item = 0; item < ids.size(); ++item) {
      EXPECT_EQ(homes[2 * item].address[7], std::byte{expected[item]}) << "item " << item;
    }
  }

  Tiers tiers;
  Stream user;
  std::unique_ptr<SlotRing> ring;
  std::vector<Block> homes;
  std::vector<ItemId> ids;
  std::vector<std::uint8_t> expected;
  std::uint64_t wrong = 0;
};

TEST(SlotRing, AStreamOfItemsIsWorkedOnAndComesHome) {
  for (const int slots : {1, 2, 3, 8}) {
    const RingOptions options{.slots = slots};
    Ring ring(options);
    ASSERT_TRUE(ring.open(options));
    for (int round = 0; round < 3; ++round) {
      for (int item = 0; item < 6; ++item) {
        const std::vector<ItemId> next(ring.ids.begin() + item, ring.ids.end());
        ASSERT_TRUE(ring.ring->expect(next));
        ASSERT_TRUE(ring.work_on(item, SlotRing::Use::kWritten));
      }
    }
    ASSERT_TRUE(ring.ring->drain());
    ASSERT_TRUE(ring.tiers.device->synchronize(ring.user));
    EXPECT_EQ(ring.wrong, 0U) << slots << " slots";
    ring.expect_homes();
    const auto& counters = ring.ring->counters();
    EXPECT_EQ(counters.written_back, 18 * kPiece);
    EXPECT_EQ(counters.fetched, counters.fetches * (2 * kPiece));
    if (slots == 1) {
      EXPECT_EQ(counters.fetches, 18U);
    } else if (slots == 8) {
      EXPECT_EQ(counters.fetches, 6U) << "what stays is not fetched again";
    }
  }
}

// One slot, a slow link: the third acquire comes while two copies home and a fetch are still on their way.
TEST(SlotRing, ASlotIsFilledBehindItsCopyHome) {
  const RingOptions options{.slots = 1, .items = 2, .tiers = {.link_bytes_per_second = 20e6}};
  Ring ring(options);
  ASSERT_TRUE(ring.open(options));
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(ring.work_on(i % 2, SlotRing::Use::kWritten));
  ASSERT_TRUE(ring.ring->drain());
  ASSERT_TRUE(ring.tiers.device->synchronize(ring.user));
  EXPECT_EQ(ring.wrong, 0U);
  ring.expect_homes();
  EXPECT_GT(ring.ring->collect_waits(), 0);
}

TEST(SlotRing, WhatIsExpectedKeepsItsSlot) {
  const RingOptions options{.slots = 2};
  Ring ring(options);
  ASSERT_TRUE(ring.open(options));
  ASSERT_TRUE(ring.ring->expect({ring.ids.data(), 2}));
  EXPECT_EQ(ring.ring->counters().fetches, 2U);
  const std::vector<ItemId> back = {ring.ids[1], ring.ids[0], ring.ids[5]};
  ASSERT_TRUE(ring.ring->expect(back));
  EXPECT_EQ(ring.ring->counters().fetches, 2U) << "no slot is free of what comes sooner";
  const auto uses = [](StreamedOutcome outcome) {
    return metrics().value<Metric::kStreamedUses>(CopyReason::kOptimizer, outcome);
  };
  const std::uint64_t found = uses(StreamedOutcome::kFound), loaded = uses(StreamedOutcome::kLoaded);
  ASSERT_TRUE(ring.work_on(1, SlotRing::Use::kRead));
  ASSERT_TRUE(ring.work_on(0, SlotRing::Use::kRead));
  EXPECT_EQ(ring.ring->counters().found, 2U);
  EXPECT_EQ(uses(StreamedOutcome::kFound) - found, 2U);
  ASSERT_TRUE(ring.work_on(5, SlotRing::Use::kRead));
  EXPECT_EQ(uses(StreamedOutcome::kLoaded) - loaded, 1U);
}

TEST(SlotRing, OthersRenewAHome) {
  const RingOptions options{.slots = 2, .tiers = {.link_bytes_per_second = 50e6}};
  Ring ring(options);
  ASSERT_TRUE(ring.open(options));
  ASSERT_TRUE(ring.work_on(0, SlotRing::Use::kRead));
  Device& device = *ring.tiers.device;
  ASSERT_TRUE(device.synchronize(ring.user));
  const Event written = *device.create_event();
  // On another stream, and later than the next fetch is asked for.
  ASSERT_TRUE(device.launch_host(
      ring.tiers.compute, [&, home = ring.homes[0]] { std::memset(home.address, 9, kPiece.count()); }));
  ASSERT_TRUE(device.record(ring.tiers.compute, written));
  ring.ring->renew_behind(ring.ids[0], written);
  ring.expected[0] = 9;
  ASSERT_TRUE(ring.work_on(0, SlotRing::Use::kRead));
  ASSERT_TRUE(device.synchronize(ring.user));
  EXPECT_EQ(ring.wrong, 0U) << "the slot kept what the home no longer holds";
  // The host does: nothing is on its way then.
  ASSERT_TRUE(ring.ring->expect({&ring.ids[1], 1}));
  ASSERT_TRUE(ring.ring->forget(ring.ids[1]));
  std::memset(ring.homes[2].address, 4, kPiece.count());
  ring.expected[1] = 4;
  ASSERT_TRUE(ring.work_on(1, SlotRing::Use::kRead));
  ASSERT_TRUE(device.synchronize(ring.user));
  EXPECT_EQ(ring.wrong, 0U);
  device.destroy_event(written);
}

// Random items, prefetches that prove wrong, reads and writes.
Status random_schedule(Ring& ring, unsigned seed) {
  std::mt19937 random(seed);
  for (int i = 0; i < 60; ++i) {
    const int item = static_cast<int>(random() % 6);
    if (random() % 2 == 0) {
      std::vector<ItemId> next;
      for (unsigned n = random() % 4; n > 0; --n) next.push_back(ring.ids[random() % 6]);
      if (Status expected = ring.ring->expect(next); !expected) return expected;
    }
    const auto use = random() % 3 == 0 ? SlotRing::Use::kRead : SlotRing::Use::kWritten;
    if (Status worked = ring.work_on(item, use); !worked) return worked;
    if (random() % 16 == 0) {
      if (Status drained = ring.ring->drain(); !drained) return drained;
      ring.expect_homes();
    }
  }
  return ring.ring->drain();
}

TEST(SlotRing, RandomSchedules) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    const RingOptions options{.slots = 1 + static_cast<int>(seed % 4),
                              .tiers = {.link_bytes_per_second = seed % 2 == 0 ? 4e9 : 100e6,
                                        .copies = {.chunk = 16_KiB, .window = 32_KiB}}};
    Ring ring(options);
    ASSERT_TRUE(ring.open(options));
    ASSERT_TRUE(random_schedule(ring, seed)) << "seed " << seed;
    ASSERT_TRUE(ring.tiers.device->synchronize(ring.user));
    ASSERT_EQ(ring.wrong, 0U) << "seed " << seed;
    ring.expect_homes();
  }
}

// Until the first error every byte is right; after it everything is given back.
TEST(SlotRing, LeaksNothingWhicheverCallFails) {
  bool fired = true;
  for (std::uint64_t nth = 1; fired; nth += 1 + nth / 12) {
    const RingOptions options{.slots = 2};
    Ring ring(options);  // the tiers themselves are not in question
    const ScopedFaults faults(fail_call(nth));
    Status status = ring.open(options);
    if (status) status = random_schedule(ring, static_cast<unsigned>(nth));
    fired = faults.fired();
    if (!status) {
      EXPECT_TRUE(fired) << status.error().text;
      continue;
    }
    EXPECT_TRUE(ring.tiers.device->synchronize(ring.user));
    EXPECT_EQ(ring.wrong, 0U) << "call " << nth << " failed and nobody said so";
    ring.expect_homes();
  }
}

}  // namespace
}  // namespace terrace
