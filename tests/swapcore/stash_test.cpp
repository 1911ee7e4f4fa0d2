// Bytes of a framework's memory that go to DDR and back: they are what was spilled in order of the user's
// stream, whoever else is at work, and with any call failing nothing is lost unsaid and nothing leaks.
#include "swapcore/stash/stash.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "swapcore/stash/process_lease.hpp"

namespace terrace {
namespace {

using EntryId = Stash::EntryId;
using Purpose = Stash::Purpose;
using Memory = std::vector<std::byte>;
constexpr std::size_t kBytes = 300'000;  // no multiple of anything

struct RigOptions {
  double link = 8e9;
  Bytes ddr = 64_MiB;
};

// A device whose every resource is back at the end, with a stash and a user of its own.
class Rig {
 public:
  explicit Rig(const RigOptions& options = {})
      : device(std::move(EmulatedDevice::create({.capacity = 64_MiB,
                                                 .h2d_bytes_per_second = options.link,
                                                 .d2h_bytes_per_second = options.link}))
                   .value()),
        user(*device->create_stream(StreamPriority::kNormal)) {}
  [[nodiscard]] Status open(const RigOptions& options = {}) {
    Stash::Options wanted;
    wanted.policy.hbm.budget = Amount::of(64_MiB);
    wanted.policy.ddr.budget = Amount::of(options.ddr);
    wanted.policy.ddr.hugepages = HugePages::kOff;
    wanted.join_daemon = false;
    auto opened = Stash::open(*device, std::move(wanted));
    if (!opened) return opened.error();
    stash = std::move(opened).value();
    return {};
  }
  ~Rig() {
    stash.reset();
    device->destroy_stream(user);
    EXPECT_EQ(device->pinned_bytes(), 0_B);
    EXPECT_EQ(device->live_streams(), 0);
    EXPECT_EQ(device->live_events(), 0);
  }

  // In order of the user's stream.
  void write(Memory& memory, int value) {
    EXPECT_TRUE(
        device->launch_host(user, [&memory, value] { std::memset(memory.data(), value, memory.size()); }));
  }
  [[nodiscard]] bool holds(const Memory& memory, int value) {
    bool same = true;
    EXPECT_TRUE(device->launch_host(user, [&] {
      for (const std::byte byte : memory) same = same && byte == static_cast<std::byte>(value);
    }));
    EXPECT_TRUE(device->synchronize(user));
    return same;
  }

  std::unique_ptr<EmulatedDevice> device;
  Stream user;
  std::unique_ptr<Stash> stash;
};

TEST(Stash, BytesComeBackInOrderOfTheUsersStream) {
  Rig rig({.link = 5e6});
  ASSERT_TRUE(rig.open());
  Memory memory(kBytes), other(kBytes);
  std::promise<void> gate;
  ASSERT_TRUE(rig.device->launch_host(rig.user, [&gate] { gate.get_future().wait(); }));
  rig.write(memory, 7);  // not done yet when the spill is asked for
  const auto id = rig.stash->spill(rig.user, memory.data(), Bytes(kBytes), Purpose::kActivation);
  ASSERT_TRUE(id) << id.error().text;
  ASSERT_TRUE(rig.stash->depart(rig.user, *id));
  EXPECT_FALSE(*rig.stash->left(*id));
  gate.set_value();
  rig.write(memory, 0);  // behind the departure: somebody else's bytes
  ASSERT_TRUE(rig.stash->restore(rig.user, *id, other.data()));
  ASSERT_TRUE(rig.stash->await(rig.user, *id));
  EXPECT_TRUE(rig.holds(other, 7));
  EXPECT_TRUE(rig.holds(memory, 0));
  EXPECT_TRUE(*rig.stash->left(*id));
  // Once more, from the same entry.
  ASSERT_TRUE(rig.stash->restore(rig.user, *id, memory.data()));
  ASSERT_TRUE(rig.stash->await(rig.user, *id));
  EXPECT_TRUE(rig.holds(memory, 7));
  ASSERT_TRUE(rig.stash->drop(rig.user, *id));
  const Stash::Counters counters = rig.stash->counters();
  EXPECT_EQ(counters.spilled, Bytes(kBytes));
  EXPECT_EQ(counters.restored, Bytes(2 * kBytes));
  EXPECT_EQ(counters.entries, 0U);
  EXPECT_GT(counters.spill_stall_seconds, 0) << "the stream waited for 60 ms of link, and nobody counted";
}

// With a daemon: tests/daemon/negotiation_test.cpp.
TEST(ProcessLease, WithoutADaemonIsThePolicysBudgetAndAWallStandsThere) {
  static std::atomic<std::uint64_t> limit{0};
  const auto device = EmulatedDevice::create({.capacity = 64_MiB});
  ASSERT_TRUE(device);
  ProcessLease::Options options;
  options.budgets.hbm = 48_MiB;
  options.budgets.ddr = 32_MiB;
  options.daemon = ProcessLease::Options::Daemon::kNone;
  options.wall = {[](int) { return std::uint64_t{5}; }, [](int, std::uint64_t bytes) { limit = bytes; }};
  const auto lease = ProcessLease::join(**device, options);
  ASSERT_TRUE(lease) << lease.error().text;
  EXPECT_EQ(Bytes(limit.load()), 48_MiB);
  (*lease)->give_way(0_B, 0_B);
  const ProcessLease::State state = (*lease)->state();
  EXPECT_EQ(state.hbm, 48_MiB);
  EXPECT_EQ(state.target, 48_MiB);
  EXPECT_EQ(state.used, 5_B);
  EXPECT_FALSE(state.switched_off);
  EXPECT_EQ((*lease)->ddr(), 32_MiB);
}

TEST(Stash, TheHostAsAUserWaitsItself) {
  Rig rig;
  ASSERT_TRUE(rig.open());
  Memory memory(kBytes, std::byte{9});
  const auto id = rig.stash->spill({}, memory.data(), Bytes(kBytes), Purpose::kOptimizer);
  ASSERT_TRUE(id);
  ASSERT_TRUE(rig.stash->depart({}, *id));
  std::memset(memory.data(), 0, kBytes);
  ASSERT_TRUE(rig.stash->restore({}, *id, memory.data()));
  ASSERT_TRUE(rig.stash->await({}, *id));
  EXPECT_EQ(memory, Memory(kBytes, std::byte{9}));
}

TEST(Stash, AnotherUserMayRestore) {
  Rig rig({.link = 100e6});
  ASSERT_TRUE(rig.open());
  const Stream other = *rig.device->create_stream(StreamPriority::kNormal);
  Memory memory(kBytes), back(kBytes);
  rig.write(memory, 5);
  const auto id = rig.stash->spill(rig.user, memory.data(), Bytes(kBytes), Purpose::kActivation);
  ASSERT_TRUE(id);
  ASSERT_TRUE(rig.stash->depart(rig.user, *id));
  // Nothing orders this stream behind the spill but the stash.
  ASSERT_TRUE(rig.stash->restore(other, *id, back.data()));
  ASSERT_TRUE(rig.stash->await(other, *id));
  ASSERT_TRUE(rig.device->synchronize(other));
  EXPECT_EQ(back, Memory(kBytes, std::byte{5}));
  rig.device->destroy_stream(other);
}

TEST(Stash, WhatHasLeftAgainBeforeItArrivedComesBackOnceMore) {
  Rig rig({.link = 20e6});
  ASSERT_TRUE(rig.open());
  Memory memory(kBytes), first(kBytes), second(kBytes);
  rig.write(memory, 3);
  const auto id = rig.stash->spill(rig.user, memory.data(), Bytes(kBytes), Purpose::kActivation);
  ASSERT_TRUE(id);
  ASSERT_TRUE(rig.stash->depart(rig.user, *id));
  ASSERT_TRUE(rig.stash->restore(rig.user, *id, first.data()));
  ASSERT_TRUE(rig.stash->await(rig.user, *id));
  rig.write(first, 1);  // the host is ahead: nothing has come back yet, and the memory is somebody else's
  ASSERT_TRUE(rig.stash->restore(rig.user, *id, second.data()));
  ASSERT_TRUE(rig.stash->await(rig.user, *id));
  EXPECT_TRUE(rig.holds(second, 3));
  EXPECT_TRUE(rig.holds(first, 1));
  ASSERT_TRUE(rig.stash->restore(rig.user, *id, first.data()));
  ASSERT_TRUE(rig.stash->restore(rig.user, *id, second.data()));
  ASSERT_TRUE(rig.stash->drop(rig.user, *id));
  rig.write(first, 4);
  rig.write(second, 5);
  EXPECT_TRUE(rig.holds(first, 4)) << "a copy wrote into memory that was given back";
  EXPECT_TRUE(rig.holds(second, 5));
}

TEST(Stash, ADropInTheMiddleLeavesTheMemoryAlone) {
  for (const bool restoring : {false, true}) {
    Rig rig({.link = 20e6});
    ASSERT_TRUE(rig.open());
    Memory memory(kBytes), back(kBytes);
    rig.write(memory, 3);
    const auto id = rig.stash->spill(rig.user, memory.data(), Bytes(kBytes), Purpose::kActivation);
    ASSERT_TRUE(id);
    if (restoring) {
      ASSERT_TRUE(rig.stash->depart(rig.user, *id));
      ASSERT_TRUE(rig.stash->restore(rig.user, *id, back.data()));
    }
    ASSERT_TRUE(rig.stash->drop(rig.user, *id));
    rig.write(back, 1);  // behind whatever was still arriving there
    EXPECT_TRUE(rig.holds(back, 1)) << "a copy wrote into memory that was given back";
    EXPECT_EQ(rig.stash->drop(rig.user, *id).error().code, Errc::kNotFound);
  }
}

TEST(Stash, DdrThatIsFullRefusesAndRecovers) {
  const RigOptions options{.ddr = 1_MiB};
  Memory memory(1 << 20, std::byte{1});  // outlives the stash, which reads it until its end
  Rig rig(options);
  ASSERT_TRUE(rig.open(options));
  const auto first = rig.stash->spill({}, memory.data(), 1_MiB, Purpose::kActivation);
  ASSERT_TRUE(first);
  const auto second = rig.stash->spill({}, memory.data(), 1_MiB, Purpose::kActivation);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Errc::kOutOfBudget);
  ASSERT_TRUE(rig.stash->drop({}, *first));
  EXPECT_TRUE(rig.stash->spill({}, memory.data(), 1_MiB, Purpose::kActivation)) << "room was given back";
}

// A wall that borrows DDR for device memory, and gives back what it does not use.
struct BorrowingWall {
  void* lender = nullptr;
  PreloadWall::Lend* lend = nullptr;
  PreloadWall::TakeBack* take_back = nullptr;
  Bytes unused;
};
BorrowingWall borrowing;

TEST(Stash, LendsOfItsDdrToTheWallAndAsksForWhatThatDoesNotUse) {
  Rig rig;
  Stash::Options wanted;
  wanted.policy.hbm.budget = Amount::of(64_MiB);
  wanted.policy.ddr.budget = Amount::of(64_MiB);
  wanted.policy.ddr.hugepages = HugePages::kOff;
  wanted.join_daemon = false;
  wanted.wall.set_lender = [](int, void* lender, PreloadWall::Lend* lend, PreloadWall::TakeBack* take_back) {
    borrowing = {lender, lend, take_back, 0_B};
  };
  wanted.wall.return_unused = [](int) {
    const std::uint64_t back = std::exchange(borrowing.unused, 0_B).count();
    borrowing.take_back(borrowing.lender, back);
    return back;
  };
  auto opened = Stash::open(*rig.device, std::move(wanted));
  ASSERT_TRUE(opened) << opened.error().text;
  rig.stash = std::move(opened).value();
  Memory first(40'000'000), second(20'000'000);
  const auto entry = rig.stash->spill({}, first.data(), Bytes(first.size()), Purpose::kActivation);
  ASSERT_TRUE(entry) << entry.error().text;
  const Bytes lent(borrowing.lend(borrowing.lender, (48_MiB).count()));
  EXPECT_GT(lent, 8_MiB);
  EXPECT_LE(lent, 64_MiB - Bytes(first.size())) << "what holds bytes it keeps";
  EXPECT_EQ(rig.stash->lease().ddr(), 64_MiB - lent);
  EXPECT_FALSE(rig.stash->spill({}, second.data(), Bytes(second.size()), Purpose::kActivation));
  borrowing.unused = lent;
  const auto other = rig.stash->spill({}, second.data(), Bytes(second.size()), Purpose::kActivation);
  EXPECT_TRUE(other) << "with what the wall gave back";
  EXPECT_EQ(rig.stash->lease().ddr(), 64_MiB);
  rig.stash.reset();
  EXPECT_EQ(borrowing.lend, nullptr) << "who goes lends no more";
}

TEST(Stash, WrongOrderOfCallsIsRefused) {
  Memory memory(kBytes);
  Rig rig;
  ASSERT_TRUE(rig.open());
  EXPECT_EQ(rig.stash->spill({}, nullptr, 1_B, Purpose::kActivation).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(rig.stash->spill({}, memory.data(), 0_B, Purpose::kActivation).error().code,
            Errc::kInvalidArgument);
  EXPECT_EQ(rig.stash->depart({}, {77}).error().code, Errc::kNotFound);
  const auto id = rig.stash->spill({}, memory.data(), Bytes(kBytes), Purpose::kActivation);
  ASSERT_TRUE(id);
  EXPECT_EQ(rig.stash->await({}, *id).error().code, Errc::kInvalidArgument);
  EXPECT_EQ(rig.stash->restore({}, *id, nullptr).error().code, Errc::kInvalidArgument);
}

// Each thread has entries of its own and checks every byte that comes back.
TEST(Stash, ThreadsAtOnce) {
  Rig rig;
  ASSERT_TRUE(rig.open());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 25; ++i) {
        const std::size_t size = 1000 + random() % 100'000;
        const auto value = static_cast<std::byte>(t * 25 + i);
        Memory memory(size, value), back(size);
        const auto id = rig.stash->spill({}, memory.data(), Bytes(size), Purpose::kActivation);
        ASSERT_TRUE(id);
        ASSERT_TRUE(rig.stash->depart({}, *id));
        memory.assign(size, std::byte{0});
        ASSERT_TRUE(rig.stash->restore({}, *id, back.data()));
        ASSERT_TRUE(rig.stash->await({}, *id));
        ASSERT_EQ(back, Memory(size, value));
        ASSERT_TRUE(rig.stash->drop({}, *id));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(rig.stash->counters().entries, 0U);
}

// What a framework does, until the first error: then the only copy is where the contract says.
Status churn(Rig& rig, unsigned seed, bool* wrong) {
  std::mt19937 random(seed);
  for (int i = 0; i < 4; ++i) {
    const auto value = static_cast<int>(random() % 200) + 1;
    Memory memory(4096 + random() % 4096), back(memory.size());
    std::memset(memory.data(), value, memory.size());
    auto id = rig.stash->spill(rig.user, memory.data(), Bytes(memory.size()), Purpose::kActivation);
    if (!id) return id.error();
    Status status = rig.stash->depart(rig.user, *id);
    if (status) status = rig.stash->restore(rig.user, *id, back.data());
    if (status) status = rig.stash->await(rig.user, *id);
    if (status) status = rig.device->synchronize(rig.user);
    if (status && back != memory) *wrong = true;
    (void)rig.stash->drop(rig.user, *id);
    (void)rig.device->synchronize(rig.user);  // before the memory goes
    if (!status) return status;
  }
  return {};
}

TEST(Stash, LeaksNothingWhicheverCallFails) {
  bool fired = true;
  for (std::uint64_t nth = 1; fired; nth += 1 + nth / 12) {
    Rig rig;
    bool wrong = false;
    const ScopedFaults faults(fail_call(nth));
    Status status = rig.open();
    if (status) status = churn(rig, static_cast<unsigned>(nth), &wrong);
    fired = faults.fired();
    EXPECT_FALSE(wrong) << "call " << nth << " failed and nobody said so";
    EXPECT_TRUE(status || fired) << status.error().text;
  }
}

}  // namespace
}  // namespace terrace
