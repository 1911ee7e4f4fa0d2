#include "swapcore/stable/stable_space.hpp"

#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/fault.hpp"
#include "tests/runtime/passing_device.hpp"
#include "tests/swapcore/stable_rig.hpp"

namespace terrace::test {
namespace {

using testing::HasSubstr;
constexpr Bytes kBlock = StableRig::kBlock;

void fill(Address at, int value) { std::memset(at, value, kBlock.count()); }
bool holds(const std::byte* at, int value) {
  for (std::size_t i = 0; i < kBlock.count(); ++i) {
    if (at[i] != static_cast<std::byte>(value)) return false;
  }
  return true;
}

TEST(StableSpace, ThePointerStaysWhereverTheBytesAre) {
  StableRig rig;
  const Address at = rig.space->allocate(kBlock).value();
  fill(at, 7);
  rig.move(at, Place::kDdr);
  EXPECT_TRUE(holds(at, 7));
  EXPECT_EQ(rig.device->live_host_physical(), kBlock);
  fill(at, 8);  // used where it lies
  rig.move(at, Place::kHbm);
  EXPECT_TRUE(holds(at, 8));
  const StableSpace::Counters counters = rig.space->counters();
  EXPECT_EQ(counters.spills, 1U);
  EXPECT_EQ(counters.restored, kBlock);
}

// In use, as far as a test that looks by itself can be.
bool holds_in_use(StableRig& rig, Address at, int value) {
  StableSpace::Uses uses(*rig.space);
  const std::array<const void*, 1> pointer = {at};
  uses.begin(pointer, rig.slots[0]);
  return holds(at, value);
}

// What nobody uses over the link is not mapped there: a fault of a test that looks at it is this test's
// failure.
TEST(StableSpace, ABlockOutOfReachIsMappedForWhoUsesIt) {
  StableRig rig;
  const Address at = rig.space->allocate(kBlock).value(), other = rig.space->allocate(kBlock).value();
  fill(at, 1);
  fill(other, 2);
  rig.space->let_out_of_reach();
  rig.move(at, Place::kDdr);
  rig.move(other, Place::kDdr);
  rig.move(other, Place::kHbm);
  EXPECT_TRUE(holds(other, 2)) << "back in HBM it is reached again";
  EXPECT_EQ(rig.space->counters().shown, 0U);
  EXPECT_TRUE(holds_in_use(rig, at, 1));
  EXPECT_EQ(rig.space->find(at)->place, Place::kDdr);
  EXPECT_EQ(rig.space->counters().shown, 1U);
  EXPECT_TRUE(holds(at, 1)) << "and stays so";
  rig.move(at, Place::kHbm);
  rig.move(at, Place::kDdr);
  EXPECT_TRUE(holds_in_use(rig, at, 1)) << "until it moves";
  EXPECT_EQ(rig.space->counters().shown, 2U);
}

TEST(StableSpace, WhoeverNamesNothingReachesEverything) {
  for (const char* how : {"work on everything", "asked for", "held", "paused and used", "shown"}) {
    StableRig rig;
    const Address at = rig.space->allocate(kBlock).value(), later = rig.space->allocate(kBlock).value();
    fill(at, 1);
    fill(later, 2);
    rig.space->let_out_of_reach();
    rig.move(at, Place::kDdr);
    const std::string_view what = how;
    std::atomic<bool> seen{false};
    if (what == "work on everything") rig.launch_on_everything(0, [&] { seen = holds(at, 1); });
    if (what == "asked for") rig.space->keep_reachable();
    if (what == "held") {
      ASSERT_TRUE(rig.space->hold(at).ok());
    }
    if (what == "paused and used") {
      ASSERT_TRUE(rig.space->pause(std::chrono::seconds(10)));
      rig.launch(0, {at}, [] {});
      rig.space->resume();
    }
    if (what == "shown") {
      ASSERT_TRUE(rig.space->show(at + 7).ok());
    }
    ASSERT_TRUE(rig.device->synchronize(rig.streams[0]).ok());
    EXPECT_TRUE(holds(at, 1)) << how;
    EXPECT_EQ(seen, what == "work on everything");
    if (what != "work on everything" && what != "asked for") continue;
    rig.space->let_out_of_reach();
    rig.move(later, Place::kDdr);
    EXPECT_TRUE(holds(later, 2)) << "for good: " << how;
  }
}

TEST(StableSpace, WhatIsOutOfReachCanBeFreed) {
  StableRig rig;
  rig.space->let_out_of_reach();
  const Address at = rig.space->allocate(kBlock).value();
  rig.move(at, Place::kDdr);
  EXPECT_EQ(rig.space->counters().in_ddr, kBlock);
  ASSERT_TRUE(rig.space->free(at).ok());
  ASSERT_TRUE(rig.space->free(rig.space->allocate(8 * kBlock).value()).ok());  // comes behind it
}

// A device on which mapping takes as long as a test wants.
class SlowToMap final : public PassingDevice {
 public:
  using PassingDevice::PassingDevice;
  Status map(Address at, Physical physical, Bytes size) override {
    {
      std::unique_lock lock(mutex_);
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return at != held_up_; });
      --waiting_;
    }
    return PassingDevice::map(at, physical, size);
  }
  void hold_up(Address at) {
    const std::lock_guard lock(mutex_);
    held_up_ = at;
  }
  void await_somebody() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }
  void let_go() {
    hold_up(nullptr);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Address held_up_ = nullptr;
  int waiting_ = 0;
};

// A block in DDR that another thread is mapping there, for as long as this lives or until over().
struct Showing {
  explicit Showing(const StableRig::Options& with) : rig(through_slow_maps(with)) {
    rig.space->let_out_of_reach();
    at = rig.space->allocate(kBlock).value();
    other = rig.space->allocate(kBlock).value();
    fill(at, 1);
    rig.move(at, Place::kDdr);
    maps().hold_up(at);
    shows = std::jthread([this] { EXPECT_TRUE(rig.space->show(at).ok()); });
    maps().await_somebody();
  }
  ~Showing() { over(); }
  void over() {
    maps().let_go();
    if (shows.joinable()) shows.join();
  }
  [[nodiscard]] SlowToMap& maps() const { return static_cast<SlowToMap&>(*rig.front); }
  // The mover has looked at its orders, found nothing else to do, and looked again.
  void let_the_mover_look() {
    for (int times = 0; times < 3; ++times) rig.move(other, Place::kHbm);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  static StableRig::Options through_slow_maps(StableRig::Options with) {
    with.seen_through = [](EmulatedDevice& device) { return std::make_unique<SlowToMap>(device); };
    return with;
  }
  StableRig rig;
  Address at = nullptr, other = nullptr;
  std::jthread shows;
};
bool becomes_true(const std::function<bool()>& condition) {
  for (int tries = 0; tries < 20000 && !condition(); ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

TEST(StableSpace, WhatIsFreedWhileItIsShownIsBuried) {
  Showing showing({.hbm = 2 * kBlock});
  StableSpace& space = *showing.rig.space;
  ASSERT_TRUE(space.free(showing.at).ok());
  showing.let_the_mover_look();
  EXPECT_TRUE(space.any_in_ddr()) << "not while it is being mapped";
  showing.over();
  ASSERT_TRUE(becomes_true([&] { return !space.any_in_ddr(); }));
  ASSERT_TRUE(space.allocate(kBlock).ok());
  const Result<Address> more = space.allocate(kBlock);  // waits for nobody's burial
  ASSERT_FALSE(more.ok());
  EXPECT_EQ(more.error().code, Errc::kOutOfBudget);
}

TEST(StableSpace, AnOrderForWhatIsShownIsCarriedOutAfterwards) {
  Showing showing({});
  ASSERT_TRUE(showing.rig.space->order(showing.at, Place::kHbm).ok());
  showing.let_the_mover_look();
  showing.over();
  const Status moved = showing.rig.space->await(showing.at);
  EXPECT_TRUE(moved.ok()) << moved.error().text;
  EXPECT_EQ(showing.rig.space->find(showing.at)->place, Place::kHbm);
  EXPECT_TRUE(holds(showing.at, 1));
}

TEST(StableSpace, AnOrderForWhatWasShownWaitsForNoOtherMove) {
  Showing showing({});
  StableRig& rig = showing.rig;
  std::atomic<bool> may_go{false};
  rig.launch(0, {showing.other}, [&] {
    while (!may_go) std::this_thread::yield();
  });
  ASSERT_TRUE(rig.space->order(showing.other, Place::kDdr).ok());
  ASSERT_TRUE(rig.space->order(showing.at, Place::kHbm).ok());
  ASSERT_TRUE(becomes_true([&] { return rig.space->busy(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // until both orders have been looked at
  showing.over();
  EXPECT_TRUE(becomes_true([&] { return rig.space->find(showing.at)->place == Place::kHbm; }));
  may_go = true;
  EXPECT_TRUE(rig.space->await(showing.other).ok());
}

TEST(StableSpace, PointersIntoABlockLeadToItAndOthersNowhere) {
  StableRig rig;
  const Address at = rig.space->allocate(kBlock + 1_B).value();
  const Bytes size = rig.space->find(at)->size;
  EXPECT_EQ(size, kBlock + 64_KiB);
  EXPECT_EQ(rig.space->find(at + size.count() - 1)->at, at);
  EXPECT_FALSE(rig.space->find(at + size.count()));
  EXPECT_FALSE(rig.space->find(nullptr));
  EXPECT_FALSE(rig.space->find(&rig));
}

TEST(StableSpace, NothingMovesWhileItIsPausedAndAfterwardsWhatWasOrdered) {
  StableRig rig;
  const Address at = rig.space->allocate(kBlock).value(), other = rig.space->allocate(kBlock).value();
  fill(at, 3);
  ASSERT_TRUE(rig.space->pause(std::chrono::seconds(10)));
  ASSERT_TRUE(rig.space->order(at, Place::kDdr).ok());
  EXPECT_EQ(rig.space->await(at).error().code, Errc::kCancelled) << "nobody waits for what does not come";
  EXPECT_EQ(rig.space->find(at)->place, Place::kHbm);
  bool ran = false;
  rig.launch_on_everything(0, [&] { ran = holds(at, 3); });  // uses go on
  ASSERT_TRUE(rig.device->synchronize(rig.streams[0]).ok());
  EXPECT_TRUE(ran);
  ASSERT_TRUE(rig.space->free(other).ok());
  rig.space->resume();
  ASSERT_TRUE(rig.space->await(at).ok());
  EXPECT_EQ(rig.space->find(at)->place, Place::kDdr);
  EXPECT_TRUE(holds(at, 3));
}

TEST(StableSpace, WhatIsHeldStaysWhereItIs) {
  StableRig rig;
  const Address here = rig.space->allocate(kBlock).value(), there = rig.space->allocate(kBlock).value();
  rig.move(there, Place::kDdr);
  for (const Address at : {here, there, there}) ASSERT_TRUE(rig.space->hold(at).ok());
  for (const Place place : {Place::kHbm, Place::kDdr}) {
    EXPECT_EQ(rig.space->order(here, place).error().code, Errc::kInvalidArgument);
    EXPECT_EQ(rig.space->order(there, place).error().code, Errc::kInvalidArgument);
  }
  EXPECT_TRUE(rig.space->find(there)->pinned);
  EXPECT_EQ(rig.space->find(there)->place, Place::kDdr);
  EXPECT_EQ(rig.space->hold(nullptr).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(rig.space->counters().in_ddr, kBlock);
  EXPECT_EQ(rig.space->counters().live_peak, 2 * kBlock);
}

// Twice the budget of blocks: some are always in DDR, and the wall holds.
TEST(StableSpace, TheBudgetIsAWall) {
  StableRig rig({.hbm = 4 * kBlock});
  std::vector<Address> blocks;
  for (int i = 0; i < 8; ++i) {
    Result<Address> at = rig.space->allocate(kBlock);
    if (!at.ok()) {
      EXPECT_EQ(at.error().code, Errc::kOutOfBudget);
      EXPECT_EQ(at.error().bytes, kBlock);
      rig.move(blocks[static_cast<std::size_t>(i - 4)], Place::kDdr);
      at = rig.space->allocate(kBlock);
    }
    ASSERT_TRUE(at.ok()) << at.error().text;
    fill(*at, i);
    blocks.push_back(*at);
  }
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(holds(blocks[static_cast<std::size_t>(i)], i));
  EXPECT_EQ(rig.space->counters().hbm_peak, 4 * kBlock);
  EXPECT_LE(rig.device->info().capacity - rig.device->memory()->free, 4 * kBlock);
}

TEST(StableSpace, ASpillComesBehindTheWorkThatUsesTheBlock) {
  StableRig rig;
  const Address at = rig.space->allocate(kBlock).value();
  fill(at, 1);
  std::atomic<bool> may_go{false};
  rig.launch(0, {at + 5}, [&] {
    while (!may_go) std::this_thread::yield();
    fill(at, 2);
  });
  ASSERT_TRUE(rig.space->order(at, Place::kDdr).ok());
  while (rig.space->find(at)->place == Place::kHbm && !may_go) {
    // The move has begun and waits for the stream.
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(rig.space->counters().spills, 0U);
    may_go = true;
  }
  ASSERT_TRUE(rig.space->await(at).ok());
  EXPECT_TRUE(holds(at, 2));
}

// It has read its pointers, and its work is not on the stream yet.
TEST(StableSpace, AMoveWaitsForWhoIsInside) {
  StableRig rig;
  const Address at = rig.space->allocate(kBlock).value();
  fill(at, 1);
  StableSpace::Uses uses(*rig.space);
  const std::array<const void*, 1> pointer = {at};
  uses.begin(pointer, rig.slots[0]);
  ASSERT_TRUE(rig.space->order(at, Place::kDdr).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(rig.space->counters().spills, 0U);
  ASSERT_TRUE(rig.device->launch_host(rig.streams[0], [at] { fill(at, 2); }).ok());
  uses.end();
  ASSERT_TRUE(rig.space->await(at).ok());
  EXPECT_TRUE(holds(at, 2));
}

// Whether the other thread comes to the gate before it is shut is its luck; it is tried until it has waited.
TEST(StableSpace, UsersOfABlockThatMovesWaitAtItsGateAndOthersDoNot) {
  StableRig rig;
  const Address moves = rig.space->allocate(kBlock).value(), stays = rig.space->allocate(kBlock).value();
  for (int tries = 0; tries < 1000 && rig.space->counters().waits == 0; ++tries) {
    rig.move(moves, Place::kHbm);
    std::atomic<bool> may_go{false};
    rig.launch(0, {moves}, [&] {
      while (!may_go) std::this_thread::yield();
    });
    ASSERT_TRUE(rig.space->order(moves, Place::kDdr).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::atomic<bool> comes{false};
    std::jthread waits([&] {
      comes = true;
      rig.launch(1, {stays, moves}, [] {});
    });
    while (!comes) std::this_thread::yield();
    rig.launch(1, {stays}, [] {});  // is never held up, or this would not end
    may_go = true;
    waits.join();
    ASSERT_TRUE(rig.space->await(moves).ok());
    EXPECT_EQ(rig.space->find(moves)->place, Place::kDdr);
  }
  EXPECT_GT(rig.space->counters().waits, 0U);
}

TEST(StableSpace, WorkOfUnknownPointersKeepsEveryBlockInPlace) {
  StableRig rig;
  std::vector<Address> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(rig.space->allocate(kBlock).value());
  std::atomic<bool> may_go{false};
  rig.launch_on_everything(0, [&] {
    while (!may_go) std::this_thread::yield();
    for (const Address at : blocks) fill(at, 3);
  });
  for (const Address at : blocks) ASSERT_TRUE(rig.space->order(at, Place::kDdr).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(rig.space->counters().spills, 0U);
  may_go = true;
  for (const Address at : blocks) ASSERT_TRUE(rig.space->await(at).ok());
  for (const Address at : blocks) EXPECT_TRUE(holds(at, 3));
  EXPECT_EQ(rig.space->counters().spills, 4U);
}

TEST(StableSpace, PinnedBlocksComeBackAndStay) {
  StableRig rig;
  const Address at = rig.space->allocate(kBlock).value();
  fill(at, 4);
  rig.move(at, Place::kDdr);
  ASSERT_TRUE(rig.space->pin(at).ok());
  EXPECT_EQ(rig.space->find(at)->place, Place::kHbm);
  const Status refused = rig.space->order(at, Place::kDdr);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().text, HasSubstr("unpin"));
  ASSERT_TRUE(rig.space->unpin(at).ok());
  EXPECT_FALSE(rig.space->unpin(at).ok());
  rig.move(at, Place::kDdr);
  EXPECT_TRUE(holds(at, 4));
}

TEST(StableSpace, WhereDdrIsShortABlockStaysInHbm) {
  StableRig rig({.ddr = 2 * kBlock});
  std::vector<Address> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(rig.space->allocate(kBlock).value());
  rig.move(blocks[0], Place::kDdr);
  rig.move(blocks[1], Place::kDdr);
  ASSERT_TRUE(rig.space->order(blocks[2], Place::kDdr).ok());
  const Status refused = rig.space->await(blocks[2]);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kOutOfBudget);
  EXPECT_EQ(rig.space->find(blocks[2])->place, Place::kHbm);
  EXPECT_EQ(rig.space->counters().failed_moves, 1U);
  rig.move(blocks[0], Place::kHbm);  // and what it leaves serves the other
  rig.move(blocks[2], Place::kDdr);
}

TEST(StableSpace, MemoryIsFreedBehindItsLastUse) {
  StableRig rig({.hbm = kBlock});
  const Address at = rig.space->allocate(kBlock).value();
  std::atomic<bool> may_go{false};
  std::atomic<int> wrong{0};
  rig.launch(0, {at}, [&, at] {
    while (!may_go) std::this_thread::yield();
    fill(at, 5);
    if (!holds(at, 5)) ++wrong;
  });
  ASSERT_TRUE(rig.space->free(at).ok());
  EXPECT_FALSE(rig.space->free(at).ok());
  EXPECT_FALSE(rig.space->find(at));
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    may_go = true;
  });
  const Address next = rig.space->allocate(kBlock).value();  // waits for the other's memory
  EXPECT_TRUE(may_go);
  fill(next, 6);
  EXPECT_EQ(wrong, 0);
}

TEST(StableSpace, WithoutHostMemoryThatTheDeviceReachesItSaysSo) {
  StableRig rig;
  auto refused = StableSpace::create(*rig.device, *rig.copies, rig.users,
                                     {.hbm_budget = kBlock, .lease = rig.lease, .nodes = {9}});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kNotSupported);
}

// Every call of the device fails once: bytes stay right, and nothing is left behind.
enum class InDdr { kReachable, kOutOfReach };
void fail_each_call(InDdr in_ddr) {
  for (std::uint64_t nth = 1;; ++nth) {
    bool fired = false;
    {
      StableRig rig({.hbm = 2 * kBlock});
      if (in_ddr == InDdr::kOutOfReach) rig.space->let_out_of_reach();
      const Address a = rig.space->allocate(kBlock).value(), b = rig.space->allocate(kBlock).value();
      fill(a, 1);
      fill(b, 2);
      ScopedFaults faults(fail_call(nth));
      Address c = nullptr;
      for (int round = 0; round < 3; ++round) {
        (void)rig.space->order(a, round % 2 == 0 ? Place::kDdr : Place::kHbm);
        (void)rig.space->order(b, round % 2 == 0 ? Place::kHbm : Place::kDdr);
        if (round % 2 == 0) (void)rig.space->await(a);
        if (round % 2 == 1) (void)rig.space->await(b);
        StableSpace::Uses uses(*rig.space);
        const std::array<const void*, 2> both = {a, b};
        uses.begin(both, rig.slots[0]);
        EXPECT_TRUE(holds(a, 1)) << nth;
        EXPECT_TRUE(holds(b, 2)) << nth;
      }
      const Result<Address> made = rig.space->allocate(kBlock);
      if (made.ok()) c = *made;
      if (c != nullptr) {
        EXPECT_TRUE(rig.space->free(c).ok());
      }
      EXPECT_TRUE(rig.space->free(a).ok());
      fired = faults.fired();
    }
    if (!fired) break;
    ASSERT_LT(nth, 500U);
  }
}
TEST(StableSpace, AFailedCallLosesNothing) { fail_each_call(InDdr::kReachable); }
TEST(StableSpace, AFailedCallLosesNothingThatIsOutOfReach) { fail_each_call(InDdr::kOutOfReach); }

}  // namespace
}  // namespace terrace::test
