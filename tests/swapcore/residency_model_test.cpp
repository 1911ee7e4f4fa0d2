// Random schedules of keep, spill, restore, take and drop, with and without failing calls: every take returns
// the bytes that were kept, or an error that left the entry where it was; nothing leaks (the fixture checks
// at its end).
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "runtime/fault.hpp"
#include "tests/swapcore/tiers_fixture.hpp"

namespace terrace {
namespace {

// So that some copies are held back.
const CopyEngine::Options kSmallChunks{.chunk = 16_KiB, .window = 32_KiB};

class Schedule {
 public:
  Schedule(Tiers& tiers, unsigned seed) : tiers_(tiers), random_(seed) {}

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      step();
      if (random_() % 4 == 0) tiers_.store->poll();
      if (random_() % 16 == 0) (void)tiers_.store->wait_for_a_spill();
    }
    for (const auto& [key, value] : model_) tiers_.store->drop(key);
    (void)tiers_.device->synchronize(tiers_.compute);
  }

 private:
  void step() {
    const EntryKey key{0, static_cast<int>(random_() % 6), EntryKey::What::kOutput,
                       static_cast<std::uint32_t>(random_() % 3)};
    auto known = model_.find(key);
    if (known == model_.end()) {
      const auto value = static_cast<std::uint8_t>(random_());
      if (BlockRef block = tiers_.filled(Bytes(1 + random_() % 100'000), value)) {
        tiers_.store->keep(key, std::move(block));
        model_[key] = value;
      }
      return;
    }
    ASSERT_TRUE(tiers_.store->state(key).has_value()) << "an entry ends only by take or drop";
    switch (random_() % 5) {
      case 4:
        (void)tiers_.store->depart(key);
        break;
      case 0:
        if (tiers_.store->state(key) == Residency::kInHbm) (void)tiers_.store->spill(key);
        break;
      case 1:
        (void)tiers_.store->restore(key);
        break;
      case 2: {
        auto taken = tiers_.store->take(key);
        if (!taken) break;
        EXPECT_TRUE(tiers_.holds(taken->block, known->second));
        model_.erase(known);
        break;
      }
      default:
        if (random_() % 4 != 0) break;
        tiers_.store->drop(key);
        model_.erase(known);
    }
  }

  Tiers& tiers_;
  std::mt19937 random_;
  std::map<EntryKey, std::uint8_t> model_;
};

TEST(ResidencyModel, EveryTakeReturnsWhatWasKept) {
  for (unsigned seed = 0; seed < 25; ++seed) {
    Tiers tiers({.hbm = 512_KiB,
                 .ddr = 768_KiB,
                 .link_bytes_per_second = seed % 2 == 0 ? 4e9 : 100e6,
                 .copies = seed % 3 == 0 ? CopyEngine::Options{} : kSmallChunks,
                 .poison = seed % 5 == 0 ? Poison::kOn : Poison::kOff});
    Schedule(tiers, seed).run(150);
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

TEST(ResidencyModel, NoFailedCallLosesAByte) {
  for (const FaultPoint point : {FaultPoint::kDeviceRecord, FaultPoint::kDeviceWait, FaultPoint::kDeviceCopy,
                                 FaultPoint::kDeviceCreateEvent, FaultPoint::kDevicePin, FaultPoint::kHostMap,
                                 FaultPoint::kDeviceCreatePhysical, FaultPoint::kDeviceMap}) {
    for (std::uint64_t nth = 1; nth < 40; nth += 3) {
      Tiers tiers({.hbm = 384_KiB, .ddr = 768_KiB, .copies = kSmallChunks});
      ScopedFaults faults(fail_call(point, nth));
      Schedule(tiers, 11).run(60);
      if (HasFailure()) FAIL() << name_of(point) << " call " << nth;
    }
  }
}

}  // namespace
}  // namespace terrace
