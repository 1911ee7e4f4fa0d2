#include "swapcore/stable/stable_pager.hpp"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "tests/swapcore/stable_rig.hpp"

namespace terrace::test {
namespace {

constexpr Bytes kBlock = StableRig::kBlock;

// A program with twice as many bytes as the budget: a step adds one to every number of every block, in order.
struct Program {
  explicit Program(StableRig& on) : rig(on), pager(*on.space, {.bytes_ahead = 4 * kBlock}) {}
  ~Program() {
    for (const Stream stream : rig.streams) EXPECT_TRUE(rig.device->synchronize(stream).ok());
  }
  void make(int blocks) {
    for (int i = 0; i < blocks; ++i) {
      const Result<Address> at = pager.allocate(kBlock);
      ASSERT_TRUE(at.ok()) << at.error().text;
      all.push_back(*at);
      launch({*at}, [a = *at] { std::memset(a, 0, kBlock.count()); });
    }
  }
  void launch(const std::vector<const void*>& pointers, std::function<void()> work) {
    StableSpace::Uses uses(*rig.space);
    pager.begin(uses, pointers, rig.slots[0]);
    ASSERT_TRUE(rig.device->launch_host(rig.streams[0], std::move(work)).ok());
  }
  void step() {
    for (std::size_t i = 0; i < all.size(); ++i) {
      launch({all[i], all[(i + 1) % all.size()]}, [a = all[i], b = all[(i + 1) % all.size()]] {
        auto* const to = reinterpret_cast<std::uint32_t*>(a);
        const auto* const from = reinterpret_cast<const std::uint32_t*>(b);
        for (std::size_t n = 0; n < kBlock.count() / sizeof(std::uint32_t); ++n) to[n] += 1 + (from[n] & 1);
        std::this_thread::sleep_for(std::chrono::microseconds(300));
      });
    }
    EXPECT_TRUE(rig.device->synchronize(rig.streams[0]).ok());
  }
  [[nodiscard]] std::vector<std::uint32_t> numbers() {
    std::vector<std::uint32_t> found;
    for (const Address at : all) {
      StableSpace::Uses uses(*rig.space);
      const std::array<const void*, 1> pointer = {at};
      uses.begin(pointer, rig.slots[0]);
      found.push_back(reinterpret_cast<const std::uint32_t*>(at)[kBlock.count() / 4 - 1]);
    }
    return found;
  }
  StableRig& rig;
  StablePager pager;
  std::vector<Address> all;
};

TEST(StablePager, AProgramTwiceTheBudgetRunsWithTheSameNumbers) {
  std::vector<std::vector<std::uint32_t>> numbers;
  for (const Bytes hbm : {16 * kBlock, 8 * kBlock}) {
    StableRig rig({.hbm = hbm});
    Program program(rig);
    program.make(16);
    for (int i = 0; i < 20; ++i) program.step();
    numbers.push_back(program.numbers());
    EXPECT_LE(rig.space->counters().hbm_peak, hbm);
    EXPECT_EQ(rig.space->counters().spills > 0, hbm < 16 * kBlock);
  }
  EXPECT_EQ(numbers[0], numbers[1]);
}

// Once the step is learned most blocks come back before they are asked for.
TEST(StablePager, ALearnedStepComesAheadOfItsUse) {
  StableRig rig({.hbm = 10 * kBlock});
  Program program(rig);
  program.make(16);
  for (int i = 0; i < 60 && program.pager.counters().period == 0; ++i) program.step();
  ASSERT_GT(program.pager.counters().period, 0U);
  const StablePager::Counters before = program.pager.counters();
  for (int i = 0; i < 20; ++i) program.step();
  const StablePager::Counters after = program.pager.counters();
  EXPECT_GT(after.ahead, before.ahead + 20);
  EXPECT_EQ(after.in_place, before.in_place);
}

// Whatever is asked for next comes at once, while what makes room for the one after it leaves.
TEST(StablePager, WhileNoStepIsKnownRoomForOneBlockIsKept) {
  StableRig rig({.hbm = 24 * kBlock});
  Program program(rig);
  program.make(32);
  std::mt19937 random(5);
  for (int i = 0; i < 100; ++i) {
    const Address at = program.all[random() % program.all.size()];
    program.launch({at}, [at] { std::memset(at, 1, 64); });
  }
  EXPECT_EQ(program.pager.counters().period, 0U);
  for (int looks = 0; looks < 2000 && rig.space->hbm_room() < kBlock; ++looks) {
    program.launch({program.all[0]}, [] {});
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(rig.space->hbm_room(), kBlock);
}

// Of 24 blocks 12 fit. Those that cannot stay, and the four places they travel through, cross the link once
// each way in a step and no others; both ways at once; in memory that was there.
TEST(StablePager, ALearnedStepMovesWhatCannotStayAndNoMore) {
  constexpr std::uint64_t kBlocks = 24, kFit = 12, kTravellers = 4, kSteps = 20;
  StableRig rig({.hbm = kFit * kBlock, .link = 1e9});
  rig.space->let_out_of_reach();
  Program program(rig);
  program.make(kBlocks);
  for (int i = 0; i < 60 && program.pager.counters().period == 0; ++i) program.step();
  ASSERT_EQ(program.pager.counters().period, kBlocks);
  for (int i = 0; i < 3; ++i) program.step();
  const StableSpace::Counters before = rig.space->counters();
  for (std::uint64_t i = 0; i < kSteps; ++i) program.step();
  const StableSpace::Counters after = rig.space->counters();
  const std::uint64_t most = kSteps * (kBlocks - kFit + kTravellers) + kTravellers;
  EXPECT_LE(after.restores - before.restores, most);
  EXPECT_LE(after.spills - before.spills, most);
  EXPECT_GE(after.restores - before.restores, kSteps * (kBlocks - kFit));
  EXPECT_GT(after.both_ways_seconds, before.both_ways_seconds);
  EXPECT_LE(after.host_made, after.in_ddr_peak + 4 * kBlock) << "each used again and again";
  EXPECT_EQ(after.shown, before.shown) << "nothing was used over the link";
}

// What is used next would come back at once otherwise, while others are still on their way out.
TEST(StablePager, NothingComesAheadIntoRoomThatSomebodyWaitsFor) {
  StableRig rig({.hbm = 16 * kBlock, .link = 0.2e9});
  Program program(rig);
  program.make(14);
  for (int i = 0; i < 60 && program.pager.counters().period == 0; ++i) {
    program.step();
    rig.move(program.all[0], Place::kDdr);  // with nothing in DDR nothing is planned
  }
  ASSERT_GT(program.pager.counters().period, 0U);
  program.step();
  const StableSpace::Counters before = rig.space->counters();
  Bytes room;
  std::uint64_t restores = 0;
  const Status made = program.pager.make_room(12 * kBlock, [&] {
    room = rig.space->hbm_room();
    restores = rig.space->counters().restores - before.restores;
  });
  ASSERT_TRUE(made.ok()) << made.error().text;
  EXPECT_GE(room, 12 * kBlock);
  EXPECT_LE(restores, 14U) << "in the place of what is used later, each at most once";
  for (int i = 0; i < 3; ++i) program.step();
  EXPECT_EQ(rig.space->counters().in_ddr, 0_B) << "and afterwards it does";
}

// Neither side has room for what a launch needs at once: it is used where it lies.
TEST(StablePager, WhereNoRoomCanBeMadeABlockIsUsedOverTheLink) {
  StableRig rig({.hbm = 2 * kBlock});
  Program program(rig);
  program.make(3);
  program.launch({program.all[0], program.all[1], program.all[2]}, [all = program.all] {
    for (const Address at : all) std::memset(at, 7, kBlock.count());
  });
  EXPECT_TRUE(rig.device->synchronize(rig.streams[0]).ok());
  for (const std::uint32_t number : program.numbers()) EXPECT_EQ(number, 0x07070707U);
  EXPECT_GT(program.pager.counters().in_place, 0U);
}

TEST(StablePager, WhereBothSidesAreFullAllocationSaysSo) {
  StableRig rig({.hbm = 2 * kBlock, .ddr = 2 * kBlock});
  Program program(rig);
  program.make(4);
  const Result<Address> refused = program.pager.allocate(kBlock);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
  ASSERT_TRUE(program.pager.free(program.all[0]).ok());
  program.all.erase(program.all.begin());
  program.make(1);
}

}  // namespace
}  // namespace terrace::test
