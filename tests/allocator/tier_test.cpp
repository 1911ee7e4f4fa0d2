// What every tier promises, asked of each.
#include "allocator/tier.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>

#include "allocator/tiers/ddr_tier.hpp"
#include "allocator/tiers/nvme_tier.hpp"
#include "allocator/tiers/peer_tier.hpp"
#include "runtime/fault.hpp"
#include "tests/allocator/tier_rig.hpp"

namespace terrace {
namespace {

constexpr Bytes kBudget = 2_MiB;

using Open = std::function<Result<std::unique_ptr<Tier>>(TierRig&)>;

template <typename T>
Result<std::unique_ptr<Tier>> as_tier(Result<std::unique_ptr<T>> made) {
  if (!made) return std::move(made).error();
  return std::unique_ptr<Tier>(std::move(made).value());
}

Result<std::unique_ptr<Tier>> open_ddr(TierRig& rig) {
  rig.ddr->set_budget(kBudget);
  return std::unique_ptr<Tier>(std::make_unique<DdrTier>(*rig.device, *rig.ddr, *rig.copies));
}
Result<std::unique_ptr<Tier>> open_peer(TierRig& rig) {
  return as_tier(PeerTier::create(*rig.device, *rig.peer, {.budget = kBudget, .slab = 256_KiB}));
}
Open open_nvme(IoChoice io) {
  return [io](TierRig& rig) {
    return as_tier(rig.open_nvme(
        {.folder = rig.folder.path(), .size = kBudget, .piece = 16_KiB, .pieces = 5, .io = io}));
  };
}

struct Case {
  const char* name;
  TierId id;
  Open open;
};
void PrintTo(const Case& which, std::ostream* out) { *out << which.name; }

class TierTest : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Tier> open() { return std::move(GetParam().open(rig_)).value(); }
  TierRig rig_;
};

INSTANTIATE_TEST_SUITE_P(All, TierTest,
                         testing::Values(Case{"ddr", TierId::kDdr, open_ddr},
                                         Case{"peer", TierId::kPeer, open_peer},
                                         Case{"nvme", TierId::kNvme, open_nvme(IoChoice::kAuto)},
                                         Case{"nvme_threads", TierId::kNvme, open_nvme(IoChoice::kThreads)}),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(TierTest, BytesComeBackAsTheyWere) {
  auto tier = open();
  EXPECT_EQ(tier->info().id, GetParam().id);
  EXPECT_FALSE(tier->info().how.empty());
  // Odd, one piece exactly, many pieces and a bit.
  for (const Bytes size : {1_B, 4097_B, 16_KiB, 16_KiB * 11 + 123_B}) {
    const TierBlock block = *tier->allocate(size, Pool::kActivation);
    EXPECT_EQ(block.size, size);
    EXPECT_EQ(block.address != nullptr, tier->info().device_addressable);
    write_pattern(rig_.hbm, size, size.count());
    EXPECT_TRUE(tier->store(block, rig_.hbm, {})->synchronize());
    std::memset(rig_.hbm, 0xAA, 2 * size.count());
    for (int again = 0; again < 2; ++again) {
      EXPECT_TRUE(tier->load(rig_.hbm, block, {})->synchronize());
      EXPECT_TRUE(has_pattern(rig_.hbm, size, size.count()));
    }
    EXPECT_EQ(rig_.hbm[size.count()], std::byte{0xAA}) << "not a byte more";
    if (block.address != nullptr) {
      EXPECT_TRUE(has_pattern(block.address, size, size.count()));
    }
    EXPECT_TRUE(tier->free(block));
  }
  EXPECT_EQ(tier->usage().live, 0_B);
}

TEST_P(TierTest, ATransferComesAfterItsEvent) {
  auto tier = open();
  const TierBlock block = *tier->allocate(100_KiB, Pool::kActivation);
  const Event ready = *rig_.device->create_event();
  ASSERT_TRUE(rig_.device->launch_host(rig_.compute, [this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    write_pattern(rig_.hbm, 100_KiB, 7);
  }));
  ASSERT_TRUE(rig_.device->record(rig_.compute, ready));
  const auto stored = tier->store(block, rig_.hbm, ready);
  // The event is the caller's again: the store keeps to the first recording.
  ASSERT_TRUE(rig_.device->record(rig_.compute, ready));
  ASSERT_TRUE(stored->synchronize());
  EXPECT_TRUE(stored->done());

  // A load waits for those who still read its target.
  bool kept = false;
  ASSERT_TRUE(rig_.device->launch_host(rig_.compute, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    kept = has_pattern(rig_.hbm, 100_KiB, 7);
    std::memset(rig_.hbm, 0, (100_KiB).count());
  }));
  ASSERT_TRUE(rig_.device->record(rig_.compute, ready));
  const auto loaded = tier->load(rig_.hbm, block, ready);
  ASSERT_TRUE(loaded->wait_on(rig_.compute));
  bool arrived = false;
  ASSERT_TRUE(rig_.device->launch_host(rig_.compute, [&] { arrived = has_pattern(rig_.hbm, 100_KiB, 7); }));
  ASSERT_TRUE(rig_.device->synchronize(rig_.compute));
  EXPECT_TRUE(kept);
  EXPECT_TRUE(arrived);
  ASSERT_TRUE(loaded->synchronize());
  EXPECT_TRUE(tier->free(block));
  rig_.device->destroy_event(ready);
}

// Whatever comes before a transfer and fails, fails it.
TEST_P(TierTest, AFailureBeforeAStoreLeavesTheBlockEmpty) {
  auto tier = open();
  const TierBlock block = *tier->allocate(40_KiB, Pool::kActivation);
  ASSERT_TRUE(tier->store(block, rig_.hbm, {})->synchronize());
  const Event ready = *rig_.device->create_event();
  ASSERT_TRUE(rig_.device->launch_host(rig_.compute, [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    throw std::runtime_error("the kernel failed");
  }));
  ASSERT_TRUE(rig_.device->record(rig_.compute, ready));
  const auto stored = tier->store(block, rig_.hbm, ready);
  ASSERT_TRUE(stored);
  EXPECT_FALSE(stored->synchronize());
  EXPECT_EQ(tier->load(rig_.hbm, block, {}).error().code, Errc::kInvalidArgument);
  EXPECT_TRUE(tier->free(block));
  EXPECT_FALSE(rig_.device->synchronize(rig_.compute));
  rig_.device->destroy_event(ready);
}

TEST_P(TierTest, MisuseIsAnError) {
  auto tier = open();
  const auto refused = [](const auto& result) {
    return !result.ok() && result.error().code == Errc::kInvalidArgument;
  };
  EXPECT_TRUE(refused(tier->allocate(0_B, Pool::kWeights)));
  const TierBlock block = *tier->allocate(64_KiB, Pool::kWeights);
  EXPECT_TRUE(refused(tier->load(rig_.hbm, block, {}))) << "nothing stored";
  TierBlock longer = block;
  longer.size += 1_B;
  EXPECT_TRUE(refused(tier->store(longer, rig_.hbm, {}))) << "not the block that was given out";
  EXPECT_TRUE(refused(tier->free(TierBlock{.id = 999, .size = 1_B})));

  const Event never_yet = *rig_.device->create_event();
  std::atomic<bool> go = false;
  ASSERT_TRUE(rig_.device->launch_host(rig_.compute, [&] { go.wait(false); }));
  ASSERT_TRUE(rig_.device->record(rig_.compute, never_yet));
  const auto stored = tier->store(block, rig_.hbm, never_yet);
  ASSERT_TRUE(stored);
  EXPECT_FALSE(stored->done());
  EXPECT_TRUE(refused(tier->store(block, rig_.hbm, {})));
  EXPECT_TRUE(refused(tier->load(rig_.hbm, block, {})));
  EXPECT_TRUE(refused(tier->free(block)));
  go = true;
  go.notify_all();
  EXPECT_TRUE(stored->synchronize());
  EXPECT_TRUE(tier->free(block));
  EXPECT_TRUE(refused(tier->free(block)));
  EXPECT_TRUE(refused(tier->store(block, rig_.hbm, {})));
  rig_.device->destroy_event(never_yet);
}

TEST_P(TierTest, TheBudgetIsAWall) {
  auto tier = open();
  EXPECT_EQ(tier->allocate(Bytes(~0ULL), Pool::kExpert).error().code, Errc::kOutOfBudget);
  EXPECT_EQ(tier->allocate(kBudget + 1_B, Pool::kExpert).error().code, Errc::kOutOfBudget);
  for (int round = 0; round < 2; ++round) {
    std::vector<TierBlock> blocks;
    while (auto block = tier->allocate(100_KiB, Pool::kExpert)) blocks.push_back(*block);
    EXPECT_GE(blocks.size(), 15U);
    EXPECT_LE(tier->usage().mapped, kBudget);
    EXPECT_GE(tier->usage().live, 100_KiB * blocks.size());
    EXPECT_EQ(tier->usage().live, tier->usage().live_by_pool[static_cast<std::size_t>(Pool::kExpert)]);
    const Bytes live = tier->usage().live;
    const auto refused = tier->allocate(100_KiB, Pool::kExpert);
    EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
    EXPECT_EQ(refused.error().pool, Pool::kExpert);
    EXPECT_EQ(tier->usage().live, live);
    for (const TierBlock& block : blocks) EXPECT_TRUE(tier->free(block));
    EXPECT_EQ(tier->usage().live, 0_B);
  }
}

// Against a map of what each block holds: as many transfers in flight as there are blocks, waited for in an
// order of the seed.
TEST_P(TierTest, ManyInFlightAgreeWithAReference) {
  auto tier = open();
  constexpr int kSlots = 8;
  constexpr Bytes kSlot = TierRig::kHbm / kSlots;
  for (unsigned seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    struct Live {
      TierBlock block;
      std::uint64_t tag = 0;  // 0: nothing stored
    };
    std::vector<Live> live;
    for (int round = 0; round < 12; ++round) {
      while (live.size() < kSlots) {
        auto block = tier->allocate(Bytes(1 + random() % 200'000), Pool::kActivation);
        if (!block) break;
        live.push_back({*block, 0});
      }
      struct Flight {
        TierTicket ticket;
        std::size_t index;
        bool load;
      };
      std::vector<Flight> flights;
      for (std::size_t i = 0; i < live.size(); ++i) {
        const Address at = rig_.hbm + i * kSlot.count();
        const bool load = live[i].tag != 0 && random() % 2 == 0;
        if (load) {
          std::memset(at, 0, live[i].block.size.count());
          flights.push_back({std::move(tier->load(at, live[i].block, {})).value(), i, true});
        } else {
          live[i].tag = random();
          write_pattern(at, live[i].block.size, live[i].tag);
          flights.push_back({std::move(tier->store(live[i].block, at, {})).value(), i, false});
        }
      }
      std::shuffle(flights.begin(), flights.end(), random);
      for (const Flight& flight : flights) {
        ASSERT_TRUE(flight.ticket.synchronize());
        if (!flight.load) continue;
        const Live& held = live[flight.index];
        EXPECT_TRUE(has_pattern(rig_.hbm + flight.index * kSlot.count(), held.block.size, held.tag))
            << "seed " << seed << ", round " << round;
      }
      flights.clear();
      for (std::size_t i = 0; i < live.size();) {
        if (random() % 3 == 0) {
          EXPECT_TRUE(tier->free(live[i].block));
          live[i] = live.back();
          live.pop_back();
        } else {
          ++i;
        }
      }
    }
    for (const Live& each : live) EXPECT_TRUE(tier->free(each.block));
    EXPECT_EQ(tier->usage().live, 0_B);
  }
}

TEST_P(TierTest, SeveralThreadsUseItAtOnce) {
  auto tier = open();
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([this, &tier, t] {
      std::mt19937 random(t);
      const Address at = rig_.hbm + t * (1_MiB).count();
      for (int i = 0; i < 15; ++i) {
        const TierBlock block = *tier->allocate(Bytes(1 + random() % 300'000), Pool::kActivation);
        write_pattern(at, block.size, i + 1);
        EXPECT_TRUE(tier->store(block, at, {})->synchronize());
        std::memset(at, 0, block.size.count());
        EXPECT_TRUE(tier->load(at, block, {})->synchronize());
        EXPECT_TRUE(has_pattern(at, block.size, i + 1));
        EXPECT_TRUE(tier->free(block));
      }
    });
  }
  threads.clear();
  EXPECT_EQ(tier->usage().live, 0_B);
}

// What each call may do when one beneath it fails: give an error, or bring the right bytes.
void churn(const Open& open, TierRig& rig) {
  const auto ready_or = rig.device->create_event();
  if (!ready_or) return;
  const Event ready = *ready_or;
  auto opened = open(rig);
  if (!opened) return rig.device->destroy_event(ready);
  const std::unique_ptr<Tier> tier = std::move(opened).value();
  for (int i = 1; i <= 2; ++i) {
    const auto block = tier->allocate(70_KiB, Pool::kActivation);
    if (!block) continue;
    write_pattern(rig.hbm, 70_KiB, i);
    (void)rig.device->launch_host(rig.compute,
                                  [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
    (void)rig.device->record(rig.compute, ready);
    const auto stored = tier->store(*block, rig.hbm, ready);
    const bool held = stored && stored->synchronize().ok();
    EXPECT_TRUE(has_pattern(rig.hbm, 70_KiB, i)) << "the HBM copy is the truth";
    const auto loaded = tier->load(rig.hbm + (1_MiB).count(), *block, {});
    if (!held) {
      EXPECT_FALSE(loaded);
    }
    if (loaded && loaded->synchronize().ok()) {
      EXPECT_TRUE(has_pattern(rig.hbm + (1_MiB).count(), 70_KiB, i));
    }
    EXPECT_TRUE(tier->free(*block));
  }
  EXPECT_EQ(tier->usage().live, 0_B);
  (void)rig.device->synchronize(rig.compute);
  rig.device->destroy_event(ready);
}

TEST_P(TierTest, LeaksNothingWhicheverCallFails) {
  const std::size_t files = open_files();
  for (std::uint64_t nth = 1;; ++nth) {
    ASSERT_LT(nth, 2000U) << "every call has had its turn long ago";
    bool fired = false;
    {
      TierRig rig;
      std::optional<ScopedFaults> faults(std::in_place, fail_call(nth));
      ScopedFaults& plan = *faults;
      churn(GetParam().open, rig);
      fired = plan.fired();
      faults.reset();
    }
    EXPECT_EQ(open_files(), files) << "after failing call " << nth;
    if (!fired) break;
  }
}

}  // namespace
}  // namespace terrace
