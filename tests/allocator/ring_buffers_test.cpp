#include "allocator/ring/ring_buffers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "allocator/ring/ring_rank.hpp"
#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/allocator/ring_world.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

RingOptions small_ring() {
  RingOptions options;
  options.slots = 4;
  options.slot_bytes = 128_KiB;
  options.timeout = std::chrono::seconds(60);
  options.shape = {.senders = 3, .receivers = 2, .copiers = 2};
  return options;
}

class Emulated {
 public:
  explicit Emulated(std::uint32_t ranks, Bytes capacity = 64_MiB) {
    for (std::uint32_t i = 0; i < ranks; ++i)
      devices.push_back(std::move(EmulatedDevice::create({.capacity = capacity})).value());
  }
  [[nodiscard]] std::vector<Device*> pointers() const {
    std::vector<Device*> all;
    for (const auto& device : devices) all.push_back(device.get());
    return all;
  }
  std::vector<std::unique_ptr<EmulatedDevice>> devices;
};

class RingAmong : public testing::TestWithParam<std::uint32_t> {
 protected:
  RingAmong() : machine_(GetParam()), world_(machine_.pointers(), {}) {}
  Emulated machine_;
  RingWorld world_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, RingAmong, testing::Values(2U, 3U, 4U));

TEST_P(RingAmong, EveryPartArrivesOverManyEpochsWhateverTheCounts) {
  expect_ok(world_.make_ring(small_ring()));
  std::mt19937_64 random(GetParam());
  for (std::uint64_t round = 0; round < 14; ++round) {
    world_.fill_random(random, (128_KiB).count(), round);
    for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank)
      expect_ok(world_.ring(rank).exchange(world_.stream(rank), world_.parts(rank), world_.room(rank)));
    world_.finish();
    for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
      world_.expect_counts(rank);
      world_.expect_received(rank);
    }
  }
  EXPECT_EQ(world_.ring(0).exchanges(), 14U);
}

// The host queues far more exchanges than there are slots, waits for none, and each rank has its own thread.
TEST_P(RingAmong, RanksRunAheadOfEachOtherWithoutTheHost) {
  expect_ok(world_.make_ring(small_ring()));
  world_.fill_equal(4096, 5);
  std::vector<std::jthread> hosts;
  for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
    hosts.emplace_back([this, rank] {
      for (int i = 0; i < 40; ++i)
        expect_ok(world_.ring(rank).exchange(world_.stream(rank), world_.parts(rank), world_.room(rank)));
    });
  }
  hosts.clear();
  world_.finish();
  for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) world_.expect_received(rank);
}

TEST_P(RingAmong, InPlaceThePartsLieInTheirSlots) {
  expect_ok(world_.make_ring(small_ring()));
  std::mt19937_64 random(GetParam() + 100);
  for (std::uint64_t round = 0; round < 10; ++round) {
    world_.fill_random(random, (100_KiB).count(), round);
    std::vector<RingTicket> tickets;
    for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
      auto ticket = world_.ring(rank).exchange_in_place(world_.stream(rank), world_.parts(rank),
                                                        world_.arrived(rank).counts());
      ASSERT_TRUE(ticket.ok()) << ticket.error().text;
      tickets.push_back(*ticket);
    }
    world_.finish();
    for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
      world_.expect_counts(rank);
      for (std::uint32_t sender = 0; sender < world_.ranks(); ++sender) {
        const std::uint64_t size = world_.size_of(sender, rank);
        if (sender == rank || size == 0) continue;
        const std::byte* part = world_.ring(rank).part(tickets[rank], sender);
        world_.expect_part(world_.receive(rank).read(part, size), sender, rank);
      }
      expect_ok(world_.ring(rank).release(world_.stream(rank), tickets[rank]));
    }
  }
}

TEST_P(RingAmong, EqualPartsGoThroughSlotsOrStraightByKernelOrCopyEngines) {
  expect_ok(world_.make_ring(small_ring()));
  for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank)
    world_.ring(rank).register_receive(world_.receive(rank).data(), world_.receive(rank).size());
  std::uint64_t round = 0;
  for (const RingPath path :
       {RingPath::kSlots, RingPath::kDirect, RingPath::kCopyEngines, RingPath::kFastest}) {
    // The last is larger than a slot: only what does not pass through slots may be.
    for (const Bytes each : {16_KiB, 128_KiB, 200_KiB}) {
      if (path == RingPath::kSlots && each > 128_KiB) continue;
      world_.fill_equal(each.count(), ++round);
      for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
        expect_ok(
            world_.ring(rank).exchange_equal(world_.stream(rank), {.send = world_.send(rank).data(),
                                                                   .receive = world_.receive(rank).data(),
                                                                   .each = each,
                                                                   .path = path}));
      }
      world_.finish();
      for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) world_.expect_received(rank);
    }
  }
}

TEST_P(RingAmong, NothingIsAllocatedOnceTheRingIsMade) {
  expect_ok(world_.make_ring(small_ring()));
  for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank)
    world_.ring(rank).register_receive(world_.receive(rank).data(), world_.receive(rank).size());
  const auto held = [&] {
    std::vector<std::uint64_t> counts;
    for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
      const EmulatedDevice& device = *machine_.devices[rank];
      const PoolUsage usage = world_.pool(rank).usage();
      for (const Bytes bytes : {device.live_physical(), device.reserved_bytes(), device.mapped_bytes(),
                                device.pinned_bytes(), usage.live, usage.live_peak, usage.mapped_peak})
        counts.push_back(bytes.count());
      counts.push_back(static_cast<std::uint64_t>(device.live_streams()));
      counts.push_back(static_cast<std::uint64_t>(device.live_events()));
    }
    return counts;
  };
  world_.fill_equal(10'000, 1);
  const std::vector<std::uint64_t> before = held();
  // Any call that takes memory or a handle would fail.
  const ScopedFaults physical(fail_call(FaultPoint::kDeviceCreatePhysical, 1));
  for (int i = 0; i < 6; ++i) {
    std::vector<RingTicket> tickets;
    for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
      const Stream stream = world_.stream(rank);
      expect_ok(world_.ring(rank).exchange(stream, world_.parts(rank), world_.room(rank)));
      for (const RingPath path : {RingPath::kDirect, RingPath::kCopyEngines}) {
        expect_ok(world_.ring(rank).exchange_equal(stream, {.send = world_.send(rank).data(),
                                                            .receive = world_.receive(rank).data(),
                                                            .each = 10'000_B,
                                                            .path = path}));
      }
      auto ticket = world_.ring(rank).exchange_in_place(stream, world_.parts(rank), nullptr);
      ASSERT_TRUE(ticket.ok());
      expect_ok(world_.ring(rank).release(stream, *ticket));
    }
  }
  world_.finish();
  EXPECT_EQ(held(), before);
  EXPECT_EQ(physical.calls(), 0U);
}

// The host queues many exchanges that go straight into the buffers, among others, and waits for none.
TEST_P(RingAmong, WhatGoesStraightAndWhatGoesThroughSlotsFollowEachOther) {
  RingOptions options = small_ring();
  options.slots = 2;
  expect_ok(world_.make_ring(options));
  for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank)
    world_.ring(rank).register_receive(world_.receive(rank).data(), world_.receive(rank).size());
  world_.fill_equal(50'000, 7);
  std::vector<std::jthread> hosts;
  for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) {
    hosts.emplace_back([this, rank] {
      for (int i = 0; i < 30; ++i) {
        const RingPath path = i % 3 == 0 ? RingPath::kSlots : RingPath::kDirect;
        expect_ok(
            world_.ring(rank).exchange_equal(world_.stream(rank), {.send = world_.send(rank).data(),
                                                                   .receive = world_.receive(rank).data(),
                                                                   .each = 50'000_B,
                                                                   .path = path}));
      }
    });
  }
  hosts.clear();
  world_.finish();
  for (std::uint32_t rank = 0; rank < world_.ranks(); ++rank) world_.expect_received(rank);
  EXPECT_EQ(world_.ring(0).exchanges(), 30U);
}

class RingOfTwo : public testing::Test {
 protected:
  RingOfTwo() : machine_(2), world_(machine_.pointers(), {}) {}
  [[nodiscard]] Status exchange(std::uint32_t rank) {
    return world_.ring(rank).exchange(world_.stream(rank), world_.parts(rank), world_.room(rank));
  }
  void exchange_both() {
    expect_ok(exchange(0));
    expect_ok(exchange(1));
  }
  void synchronize() {
    for (std::uint32_t rank = 0; rank < 2; ++rank)
      expect_ok(world_.device(rank).synchronize(world_.stream(rank)));
  }
  Emulated machine_;
  RingWorld world_;
};

TEST_F(RingOfTwo, TakesItsMemoryFromTheCommPoolAndGivesItBack) {
  const auto slots = [] { return metrics().value<Metric::kRingSlots>(RingSlotState::kFree); };
  const std::uint64_t slots_before = slots();
  const Bytes before = world_.pool(0).usage().live;
  expect_ok(world_.make_ring(small_ring()));
  EXPECT_EQ(slots() - slots_before, 2U * small_ring().slots) << "one peer each";
  const PoolUsage usage = world_.pool(0).usage();
  EXPECT_EQ(usage.live_by_pool[static_cast<std::size_t>(Pool::kComm)],
            round_up(RingBuffers::bytes_per_rank(small_ring(), 2), 512_B));
  EXPECT_EQ(world_.pool(0).find(world_.ring(0).memory())->pool, Pool::kComm);
  world_.drop_ring();
  EXPECT_EQ(slots(), slots_before);
  EXPECT_EQ(world_.pool(0).usage().live, before);
}

TEST_F(RingOfTwo, AnExchangeIsAnnouncedToCopiesWhileItRuns) {
  expect_ok(world_.make_ring(small_ring()));
  world_.fill_equal(1024, 1);
  LinkTime& link = world_.device(0).link_time();
  const CollectiveLane& lane = link.seat().own().lanes[0];
  exchange_both();
  synchronize();
  EXPECT_EQ(lane.begun, 0U) << "nobody copies, nobody listens";
  link.count_copier();
  for (std::uint32_t i = 1; i <= 2; ++i) {
    expect_ok(exchange(0));
    while (lane.begun != i) std::this_thread::yield();
    EXPECT_EQ(lane.ended, i - 1) << "it waits for the other rank";
    expect_ok(exchange(1));
    synchronize();
    EXPECT_EQ(lane.ended, i);
  }
  link.discount_copier();
}

TEST_F(RingOfTwo, AnOverflowIsToldOnceToBothAndTheRingGoesOn) {
  expect_ok(world_.make_ring(small_ring()));
  world_.fill({{16, (192_KiB).count()}, {32, 48}}, 1);
  exchange_both();
  synchronize();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const Status told = world_.ring(rank).check();
    ASSERT_FALSE(told.ok()) << "rank " << rank;
    EXPECT_EQ(told.error().code, Errc::kInvalidArgument);
    EXPECT_EQ(told.error().bytes, 192_KiB);
    EXPECT_THAT(told.error().text,
                HasSubstr("channel 0->1, slot 0, epoch 0: 192.0 KiB to send, 128.0 KiB fit"));
    expect_ok(world_.ring(rank).check());
  }
  EXPECT_EQ(world_.arrived(1).read_counts(2), (std::vector<std::uint64_t>{(128_KiB).count(), 48}));
  world_.fill_equal(5000, 2);
  exchange_both();
  world_.finish();
  world_.expect_received(1);
}

TEST_F(RingOfTwo, ARankThatNeverShowsUpIsNamed) {
  RingOptions options = small_ring();
  options.timeout = std::chrono::milliseconds(20);
  expect_ok(world_.make_ring(options));
  world_.fill_equal(1000, 1);
  expect_ok(exchange(1));
  expect_ok(world_.device(1).synchronize(world_.stream(1)));
  const Status told = world_.ring(1).check();
  ASSERT_FALSE(told.ok());
  EXPECT_EQ(told.error().code, Errc::kTimeout);
  EXPECT_THAT(
      told.error().text,
      HasSubstr("rank 1 waits for rank 0: channel 0->1, slot 0, epoch 0, head 0, tail 0: no message"));
  EXPECT_EQ(exchange(1).error().code, Errc::kTimeout) << "the ring has stopped";
  EXPECT_EQ(world_.ring(1).check().error().code, Errc::kTimeout) << "and says so every time";
  expect_ok(world_.ring(0).check());
}

TEST_F(RingOfTwo, WhatIsHeldInPlaceIsReleasedInOrderAndBeforeAnythingElse) {
  RingOptions options = small_ring();
  options.slots = 2;
  expect_ok(world_.make_ring(options));
  world_.fill_equal(1000, 1);
  std::vector<std::vector<RingTicket>> tickets(2);
  const auto held = [] { return metrics().value<Metric::kRingSlots>(RingSlotState::kHeld); };
  const auto begun = [] { return metrics().value<Metric::kRingExchanges>(); };
  const std::uint64_t held_before = held(), begun_before = begun();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    RingRank& ring = world_.ring(rank);
    for (int i = 0; i < 2; ++i)
      tickets[rank].push_back(*ring.exchange_in_place(world_.stream(rank), world_.parts(rank), nullptr));
    EXPECT_EQ(held() - held_before, 2U);
    EXPECT_EQ(ring.exchange_in_place(world_.stream(rank), world_.parts(rank), nullptr).error().code,
              Errc::kInvalidArgument)
        << "both slots are held";
    EXPECT_EQ(exchange(rank).error().code, Errc::kInvalidArgument) << "it would give back what is held";
    EXPECT_EQ(ring.release(world_.stream(rank), tickets[rank][1]).error().code, Errc::kInvalidArgument);
    EXPECT_NE(ring.part(tickets[rank][0], 1 - rank), ring.part(tickets[rank][1], 1 - rank));
    for (const RingTicket ticket : tickets[rank]) expect_ok(ring.release(world_.stream(rank), ticket));
    EXPECT_EQ(ring.release(world_.stream(rank), tickets[rank][1]).error().code, Errc::kInvalidArgument);
    EXPECT_EQ(held(), held_before);
  }
  exchange_both();
  EXPECT_EQ(begun() - begun_before, 6U) << "what was refused does not count";
  world_.finish();
  world_.expect_received(0);
}

TEST_F(RingOfTwo, ACopyThatCannotBeQueuedEndsTheRing) {
  RingOptions options = small_ring();
  options.timeout = std::chrono::milliseconds(20);
  expect_ok(world_.make_ring(options));
  for (std::uint32_t rank = 0; rank < 2; ++rank)
    world_.ring(rank).register_receive(world_.receive(rank).data(), world_.receive(rank).size());
  const RingEqualParts parts{.send = world_.send(0).data(),
                             .receive = world_.receive(0).data(),
                             .each = 1_KiB,
                             .path = RingPath::kCopyEngines};
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceCopy, 1));
    EXPECT_EQ(world_.ring(0).exchange_equal(world_.stream(0), parts).error().code, Errc::kIo);
  }
  EXPECT_EQ(world_.ring(0).exchange_equal(world_.stream(0), parts).error().code, Errc::kIo);
  EXPECT_FALSE(world_.ring(0).check().ok());
}

// The own part's copy is queued beside the stream, behind what holds that up, when the peer's copy fails.
TEST_F(RingOfTwo, WhatRanBesideAFailedCopyHasEndedWhenTheCallReturns) {
  RingOptions options = small_ring();
  options.timeout = std::chrono::milliseconds(20);
  expect_ok(world_.make_ring(options));
  for (std::uint32_t rank = 0; rank < 2; ++rank)
    world_.ring(rank).register_receive(world_.receive(rank).data(), world_.receive(rank).size());
  world_.fill_equal(1024, 1);
  const std::vector<std::byte> nothing(1024);
  world_.receive(0).write(nothing.data(), nothing.size());
  expect_ok(world_.device(0).launch_host(
      world_.stream(0), [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }));
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceCopy, 2));
    const Status failed =
        world_.ring(0).exchange_equal(world_.stream(0), {.send = world_.send(0).data(),
                                                         .receive = world_.receive(0).data(),
                                                         .each = 1_KiB,
                                                         .path = RingPath::kCopyEngines});
    EXPECT_EQ(failed.error().code, Errc::kIo);
  }
  const Address own = world_.receive(0).data();  // host memory here: read with no stream in between
  world_.expect_part({own, own + 1024}, 0, 0);
}

TEST_F(RingOfTwo, RanksThatTookDifferentPathsAreToldSo) {
  RingOptions options = small_ring();
  options.timeout = std::chrono::milliseconds(500);
  expect_ok(world_.make_ring(options));
  for (std::uint32_t rank = 0; rank < 2; ++rank)
    world_.ring(rank).register_receive(world_.receive(rank).data(), world_.receive(rank).size());
  world_.fill_equal(1024, 1);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    expect_ok(world_.ring(rank).exchange_equal(world_.stream(rank),
                                               {.send = world_.send(rank).data(),
                                                .receive = world_.receive(rank).data(),
                                                .each = 1_KiB,
                                                .path = rank == 0 ? RingPath::kSlots : RingPath::kFastest}));
  }
  synchronize();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    const Status told = world_.ring(rank).check();
    ASSERT_FALSE(told.ok()) << "rank " << rank;
    EXPECT_THAT(told.error().text, HasSubstr("the ranks took different paths")) << "rank " << rank;
  }
}

TEST_F(RingOfTwo, WhatGoesStraightAsksForRegisteredBuffers) {
  expect_ok(world_.make_ring(small_ring()));
  for (const RingPath path : {RingPath::kDirect, RingPath::kCopyEngines}) {
    const Status refused = world_.ring(0).exchange_equal(
        world_.stream(0),
        {.send = world_.send(0).data(), .receive = world_.receive(0).data(), .each = 1_KiB, .path = path});
    EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
    EXPECT_THAT(refused.error().text, HasSubstr("register_receive()"));
  }
  const Status large = world_.ring(0).exchange_equal(
      world_.stream(0),
      {.send = world_.send(0).data(), .receive = world_.receive(0).data(), .each = 256_KiB});
  EXPECT_THAT(large.error().text, HasSubstr("make the ring with a larger RingOptions::slot_bytes"));
}

TEST_F(RingOfTwo, BadOptionsAreRefusedWithWhatWouldDo) {
  const auto refusal = [&](auto change) {
    RingOptions options = small_ring();
    change(options);
    const Status made = world_.make_ring(options);
    EXPECT_FALSE(made.ok());
    return made.ok() ? std::string() : made.error().text;
  };
  EXPECT_THAT(refusal([](RingOptions& o) { o.slots = 6; }), HasSubstr("power of two"));
  EXPECT_THAT(refusal([](RingOptions& o) { o.slots = 0; }), HasSubstr("power of two"));
  EXPECT_THAT(refusal([](RingOptions& o) { o.slots = 1; }),
              HasSubstr("1 slots; use a power of two from 2 on"));
  EXPECT_THAT(refusal([](RingOptions& o) { o.slot_bytes = 1000_B; }), HasSubstr("multiple of 512 B"));
  EXPECT_THAT(refusal([](RingOptions& o) { o.slot_bytes = 0_B; }), HasSubstr("multiple of 512 B"));
  EXPECT_THAT(refusal([](RingOptions& o) { o.timeout = {}; }), HasSubstr("time-out"));
  EXPECT_THAT(refusal([](RingOptions& o) { o.shape.copiers = 0; }), HasSubstr("give all three, or none"));
  EXPECT_THAT(refusal([](RingOptions& o) { o.shape.senders = 500; }), HasSubstr("run at once"));
  const std::vector<RingBuffers::Member> alone{world_.members().front()};
  EXPECT_EQ(RingBuffers::create(alone, small_ring()).error().code, Errc::kInvalidArgument);
  RingOptions huge = small_ring();
  huge.slot_bytes = 1_GiB;
  const auto made = RingBuffers::create(world_.members(), huge);
  EXPECT_EQ(made.error().code, Errc::kOutOfBudget);
  EXPECT_EQ(made.error().pool, Pool::kComm);
}

TEST_F(RingOfTwo, ChoosesAShapeThatTheDeviceRunsAtOnce) {
  RingOptions options = small_ring();
  options.shape = {};
  expect_ok(world_.make_ring(options));
  const RingShape& shape = world_.ring(0).shape();
  EXPECT_LE(shape.senders + shape.receivers + shape.copiers, *world_.device(0).exchange_blocks());
  EXPECT_GE(shape.senders, shape.receivers);
  world_.fill_equal(100'000, 3);
  exchange_both();
  world_.finish();
  world_.expect_received(0);
}

TEST(RingBuffers, LeakNothingWhicheverCallFails) {
  unsigned failures = 0;
  for (std::uint64_t nth = 1;; ++nth) {
    Emulated machine(3, 16_MiB);
    bool fired = false;
    {
      RingWorld world(machine.pointers(), {.budget = 12_MiB, .buffer = 64_KiB});
      std::vector<Bytes> live;
      for (std::uint32_t rank = 0; rank < 3; ++rank) live.push_back(world.pool(rank).usage().live);
      RingOptions options = small_ring();
      options.slot_bytes = 64_KiB;
      {
        const ScopedFaults faults(fail_call(nth));
        const Status made = world.make_ring(options);
        fired = faults.fired();
        EXPECT_TRUE(made.ok() || fired) << "call " << nth;
        failures += made.ok() ? 0 : 1;
      }
      world.drop_ring();
      for (std::uint32_t rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(world.pool(rank).usage().live, live[rank]) << "after failing call " << nth;
        EXPECT_EQ(machine.devices[rank]->pinned_bytes(), 0_B) << "after failing call " << nth;
        EXPECT_EQ(machine.devices[rank]->live_streams(), 1) << "after failing call " << nth;
      }
    }
    for (const auto& device : machine.devices) {
      EXPECT_EQ(device->live_physical(), 0_B);
      EXPECT_EQ(device->live_events(), 0);
      EXPECT_EQ(device->live_streams(), 0);
    }
    if (!fired) {
      EXPECT_GT(failures, 20U);
      break;
    }
  }
}

}  // namespace
}  // namespace terrace
