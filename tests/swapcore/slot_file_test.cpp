// Items some of which live in a file and are written there: what the user leaves in them is what it finds
// again, and no failure of the file goes unsaid.
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>

#include "allocator/tiers/nvme_tier.hpp"
#include "runtime/fault.hpp"
#include "swapcore/streamed/slot_ring.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

using ItemId = SlotRing::ItemId;
constexpr Bytes kPiece = 20_KiB;
constexpr int kItems = 6;

// Of every item a piece of state that travels both ways, one that only leaves, one that only arrives. The
// state of even items is in the file.
class FileRing {
 public:
  FileRing() { user = *tiers.device->create_stream(StreamPriority::kNormal); }
  ~FileRing() {
    ring.reset();
    (void)tiers.device->synchronize(user);
    for (const TierBlock& block : blocks) {
      if (block.id != 0) (void)file->free(block);
    }
    file.reset();
    for (const Block& home : homes) (void)tiers.ddr->free(home);
    tiers.device->destroy_stream(user);
  }

  [[nodiscard]] Status open(int slots) {
    auto made =
        NvmeTier::create(*tiers.device, *tiers.ddr, *tiers.copies,
                         {.folder = ::testing::TempDir(), .size = 1_MiB, .piece = 8_KiB, .pieces = 4});
    if (!made) return made.error();
    file = std::move(made).value();
    std::vector<BlockRef> memory;
    for (int i = 0; i < slots; ++i) {
      memory.push_back(tiers.filled(3 * kPiece, 0xEE));
      if (memory.back() == nullptr) return Error{Errc::kOutOfMemory, "no slot", {}, {}};
    }
    auto opened = SlotRing::create({.device = *tiers.device,
                                    .copies = *tiers.copies,
                                    .allocated_on = tiers.compute,
                                    .user = user,
                                    .reason = CopyReason::kOptimizer,
                                    .cold = file.get()},
                                   std::move(memory));
    if (!opened) return opened.error();
    ring = std::move(opened).value();
    for (int item = 0; item < kItems; ++item) {
      if (Status added = add(item); !added) return added;
    }
    return {};
  }

  [[nodiscard]] Status add(int item) {
    std::vector<SlotRing::Piece> pieces;
    for (const SlotRing::Flow flow : {SlotRing::Flow::kBoth, SlotRing::Flow::kOut, SlotRing::Flow::kIn}) {
      auto home = tiers.ddr->allocate(kPiece, Pool::kOptimizer);
      if (!home) return home.error();
      std::memset(home->address, flow == SlotRing::Flow::kIn ? item : 0, kPiece.count());
      homes.push_back(*home);
      pieces.push_back({home->address, kPiece, flow});
    }
    blocks.emplace_back();
    if (item % 2 == 0) {
      pieces.front().home = nullptr;
      auto block = file->allocate(kPiece, Pool::kOptimizer);
      if (!block) return block.error();
      blocks.back() = pieces.front().cold = *block;
      const BlockRef zeros = tiers.filled(kPiece, 0);
      if (zeros == nullptr) return Error{Errc::kOutOfMemory, "no room", {}, {}};
      if (Status ready = tiers.device->synchronize(tiers.compute); !ready) return ready;
      auto stored = file->store(*block, zeros->address, Event{});
      if (!stored) return stored.error();
      if (Status done = stored->synchronize(); !done) return done;
    }
    ids.push_back(ring->add(pieces));
    expected.push_back(0);
    return {};
  }

  // Checks what arrives, adds one to each byte of the state and leaves the same in what only leaves.
  [[nodiscard]] Status work_on(int item) {
    auto at = ring->acquire(id(item));
    if (!at) return at.error();
    std::uint8_t& value = expected[static_cast<std::size_t>(item)];
    const Status launched = tiers.device->launch_host(
        user, [this, state = (*at)[0], out = (*at)[1], in = (*at)[2], was = value, item] {
          for (std::uint64_t i = 0; i < kPiece.count(); ++i) {
            wrong += state[i] != std::byte{was} || in[i] != static_cast<std::byte>(item);
            state[i] = out[i] = static_cast<std::byte>(was + 1);
          }
        });
    if (launched) ++value;
    const Status released = ring->release(id(item), SlotRing::Use::kWritten);
    return launched ? released : launched;
  }
  [[nodiscard]] Status expect_from(int item) {
    std::vector<ItemId> next;
    for (int i = 0; i < 4; ++i) next.push_back(id((item + i) % kItems));
    return ring->expect(next);
  }
  [[nodiscard]] ItemId id(int item) const { return ids[static_cast<std::size_t>(item)]; }

  void expect_homes() {
    ASSERT_TRUE(ring->drain());
    for (const ItemId item : ids) ASSERT_TRUE(ring->forget(item));
    ASSERT_TRUE(tiers.device->synchronize(user));
    for (int item = 0; item < kItems; ++item) {
      const auto i = static_cast<std::size_t>(item);
      EXPECT_EQ(homes[3 * i + 1].address[kPiece.count() - 1], std::byte{expected[i]}) << "item " << item;
      if (blocks[i].id == 0) {
        EXPECT_EQ(homes[3 * i].address[7], std::byte{expected[i]}) << "item " << item;
        continue;
      }
      const BlockRef back = tiers.filled(kPiece, 0xDD);
      ASSERT_NE(back, nullptr);
      ASSERT_TRUE(tiers.device->synchronize(tiers.compute));
      auto load = file->load(back->address, blocks[i], Event{});
      ASSERT_TRUE(load);
      ASSERT_TRUE(load->synchronize());
      EXPECT_TRUE(tiers.holds(back, expected[i])) << "item " << item;
    }
  }

  Tiers tiers{{}};
  Stream user;
  std::unique_ptr<NvmeTier> file;
  std::unique_ptr<SlotRing> ring;
  std::vector<Block> homes;
  std::vector<TierBlock> blocks;
  std::vector<ItemId> ids;
  std::vector<std::uint8_t> expected;
  std::uint64_t wrong = 0;
};

Status rounds(FileRing& ring, int count) {
  for (int round = 0; round < count; ++round) {
    for (int item = 0; item < kItems; ++item) {
      if (Status expected = ring.expect_from(item); !expected) return expected;
      if (Status worked = ring.work_on(item); !worked) return worked;
    }
  }
  return ring.ring->drain();
}

TEST(SlotFile, WhatIsWrittenComesBack) {
  for (const int slots : {1, 2, 4, 8}) {
    FileRing ring;
    ASSERT_TRUE(ring.open(slots));
    ASSERT_TRUE(rounds(ring, 3));
    ring.expect_homes();
    EXPECT_EQ(ring.wrong, 0U) << slots << " slots";
    const SlotRing::Counters& counters = ring.ring->counters();
    EXPECT_EQ(counters.to_tier, 9 * kPiece);
    EXPECT_EQ(counters.written_back, 36 * kPiece);
    EXPECT_GE(counters.from_tier, (slots == 1 ? 9 : 3) * kPiece);
    EXPECT_LE(counters.from_tier, (slots == 8 ? 3 : 12) * kPiece) << "what stays is not fetched again";
  }
}

TEST(SlotFile, InAnyOrder) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    FileRing ring;
    ASSERT_TRUE(ring.open(1 + static_cast<int>(seed % 4)));
    std::mt19937 random(seed);
    for (int i = 0; i < 60; ++i) {
      const int item = static_cast<int>(random() % kItems);
      if (random() % 2 == 0) {
        ASSERT_TRUE(ring.expect_from(static_cast<int>(random() % kItems)));
      }
      if (random() % 4 == 0) {
        ASSERT_TRUE(ring.ring->bring_here(ring.id(item)));
        EXPECT_TRUE(ring.ring->is_here(ring.id(item)));
      }
      ASSERT_TRUE(ring.work_on(item));
      if (random() % 8 == 0) {
        ASSERT_TRUE(ring.ring->forget(ring.id(static_cast<int>(random() % kItems))));
      }
      if (random() % 16 == 0) {
        ring.expect_homes();
      }
    }
    ring.expect_homes();
    ASSERT_EQ(ring.wrong, 0U) << "seed " << seed;
  }
}

// As long as the user is at work its slot cannot be stored. Who asks for what comes next is not held up, and
// gets what there is room for; all of it is on its way at once.
TEST(SlotFile, WhatIsExpectedWaitsForNoStore) {
  FileRing ring;
  ASSERT_TRUE(ring.open(2));
  std::mutex mutex;
  std::condition_variable opened;
  bool open = false;
  ASSERT_TRUE(ring.work_on(0));
  ASSERT_TRUE(ring.tiers.device->launch_host(ring.user, [&] {
    std::unique_lock lock(mutex);
    opened.wait(lock, [&] { return open; });
  }));
  ASSERT_TRUE(ring.work_on(0));
  ASSERT_TRUE(ring.ring->expect(std::vector{ring.id(1)}));
  const std::vector<ItemId> next = {ring.id(2), ring.id(4)};
  ASSERT_TRUE(ring.ring->expect(next));
  EXPECT_EQ(ring.ring->counters().from_tier, 2 * kPiece) << "one slot can be had, the other is stored";
  EXPECT_FALSE(ring.ring->is_here(ring.id(0)));
  {
    const std::lock_guard lock(mutex);
    open = true;
  }
  opened.notify_all();
  ASSERT_TRUE(ring.ring->bring_here(ring.id(0)));
  ASSERT_TRUE(ring.ring->expect(next));
  EXPECT_EQ(ring.ring->counters().from_tier, 3 * kPiece);
  ASSERT_TRUE(ring.tiers.device->synchronize(ring.user));
  EXPECT_EQ(ring.wrong, 0U);
}

// Until the first error every byte is right, and in this order nothing that fails is left unsaid.
TEST(SlotFile, EveryFailureOfTheFileIsSaid) {
  for (const FaultPoint point : {FaultPoint::kNvmeOpen, FaultPoint::kNvmeAllocate, FaultPoint::kNvmeSubmit,
                                 FaultPoint::kNvmeComplete}) {
    bool fired = true;
    for (std::uint64_t nth = 1; fired; ++nth) {
      FileRing ring;
      const ScopedFaults faults(fail_call(point, nth));
      Status status = ring.open(3);
      if (status) status = rounds(ring, 2);
      for (int item = 0; status && item < kItems; ++item) status = ring.ring->bring_here(ring.id(item));
      fired = faults.fired();
      EXPECT_EQ(status.ok(), !fired) << name_of(point) << " call " << nth;
      (void)ring.tiers.device->synchronize(ring.user);
      EXPECT_EQ(ring.wrong, 0U) << name_of(point) << " call " << nth;
      if (status) continue;
      EXPECT_EQ(status.error().code, Errc::kIo) << status.error().text;
      if (ring.ids.size() == kItems && status.error().text.find("writing") != std::string::npos) {
        EXPECT_FALSE(ring.ring->drain()) << "a store that failed is not forgotten";
        EXPECT_FALSE(ring.expect_from(0));
        EXPECT_FALSE(ring.work_on(1));
      }
    }
  }
}

TEST(SlotFile, LeaksNothingWhicheverCallFails) {
  bool fired = true;
  for (std::uint64_t nth = 1; fired; nth += 1 + nth / 12) {
    FileRing ring;
    const ScopedFaults faults(fail_call(nth));
    Status status = ring.open(3);
    if (status) status = rounds(ring, 2);
    fired = faults.fired();
    (void)ring.tiers.device->synchronize(ring.user);
    if (!status) {
      EXPECT_TRUE(fired) << status.error().text;
      continue;
    }
    EXPECT_EQ(ring.wrong, 0U) << "call " << nth << " failed and nobody said so";
  }
}

}  // namespace
}  // namespace terrace
