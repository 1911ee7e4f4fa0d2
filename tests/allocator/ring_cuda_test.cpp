// The ring buffers on real GPUs: two ranks on one device, whose kernels wait for each other, and one rank on
// each of two. Skips, saying so, where there are fewer. Small sizes: compute-sanitizer runs all of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "allocator/ring/ring_buffers.hpp"
#include "tests/allocator/ring_world.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

// By parameter: how many devices two ranks live on.
class CudaRing : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const int devices = GetParam();
    for (int index = 0; index < devices; ++index) {
      auto opened = open_cuda_device(DeviceId{.index = index});
      if (!opened.ok()) GTEST_SKIP() << "needs " << devices << " CUDA devices: " << opened.error().text;
      devices_.push_back(std::move(opened).value());
    }
    if (devices > 1) {
      const Status reach = devices_[0]->grant_access_to(*devices_[1]);
      if (!reach.ok()) GTEST_SKIP() << reach.error().text;
    }
    world_ = std::make_unique<RingWorld>(std::vector<Device*>{devices_.front().get(), devices_.back().get()},
                                         RingWorldOptions{.budget = 128_MiB, .buffer = 2_MiB});
  }
  // Both kernels of one device fit beside each other many times over.
  [[nodiscard]] static RingOptions small_ring() {
    RingOptions options;
    options.slots = 4;
    options.slot_bytes = 512_KiB;
    options.timeout = std::chrono::seconds(20);
    options.shape = {.senders = 4, .receivers = 3, .copiers = 2};
    return options;
  }
  void exchange_both() {
    for (std::uint32_t rank = 0; rank < 2; ++rank)
      expect_ok(world_->ring(rank).exchange(world_->stream(rank), world_->parts(rank), world_->room(rank)));
  }

  std::vector<std::unique_ptr<Device>> devices_;
  std::unique_ptr<RingWorld> world_;
};
INSTANTIATE_TEST_SUITE_P(Devices, CudaRing, testing::Values(1, 2));

TEST_P(CudaRing, EveryPartArrivesWhateverTheCounts) {
  expect_ok(world_->make_ring(small_ring()));
  std::mt19937_64 random(17);
  for (std::uint64_t round = 0; round < 12; ++round) {
    world_->fill_random(random, (512_KiB).count(), round);
    exchange_both();
    world_->finish();
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      world_->expect_counts(rank);
      world_->expect_received(rank);
    }
  }
}

TEST_P(CudaRing, ManyExchangesRunWithoutTheHost) {
  expect_ok(world_->make_ring(small_ring()));
  world_->fill_equal((256_KiB).count(), 3);
  for (int i = 0; i < 50; ++i) exchange_both();
  world_->finish();
  for (std::uint32_t rank = 0; rank < 2; ++rank) world_->expect_received(rank);
}

TEST_P(CudaRing, InPlaceThePartsLieInTheirSlots) {
  expect_ok(world_->make_ring(small_ring()));
  std::mt19937_64 random(19);
  for (std::uint64_t round = 0; round < 9; ++round) {
    world_->fill_random(random, (512_KiB).count(), round);
    std::vector<RingTicket> tickets;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      auto ticket = world_->ring(rank).exchange_in_place(world_->stream(rank), world_->parts(rank),
                                                         world_->arrived(rank).counts());
      ASSERT_TRUE(ticket.ok()) << ticket.error().text;
      tickets.push_back(*ticket);
    }
    world_->finish();
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      world_->expect_counts(rank);
      const std::uint64_t size = world_->size_of(1 - rank, rank);
      const std::byte* part = world_->ring(rank).part(tickets[rank], 1 - rank);
      if (size > 0) world_->expect_part(world_->receive(rank).read(part, size), 1 - rank, rank);
      expect_ok(world_->ring(rank).release(world_->stream(rank), tickets[rank]));
    }
  }
}

TEST_P(CudaRing, EqualPartsGoThroughSlotsOrStraightByKernelOrCopyEngines) {
  expect_ok(world_->make_ring(small_ring()));
  for (std::uint32_t rank = 0; rank < 2; ++rank)
    world_->ring(rank).register_receive(world_->receive(rank).data(), world_->receive(rank).size());
  std::uint64_t round = 0;
  for (const RingPath path :
       {RingPath::kSlots, RingPath::kCopyEngines, RingPath::kDirect, RingPath::kSlots}) {
    for (const Bytes each : {16_B, 100'000_B, 300'016_B, 512_KiB}) {
      world_->fill_equal(each.count(), ++round);
      for (std::uint32_t rank = 0; rank < 2; ++rank) {
        expect_ok(
            world_->ring(rank).exchange_equal(world_->stream(rank), {.send = world_->send(rank).data(),
                                                                     .receive = world_->receive(rank).data(),
                                                                     .each = each,
                                                                     .path = path}));
      }
      world_->finish();
      for (std::uint32_t rank = 0; rank < 2; ++rank) world_->expect_received(rank);
    }
  }
}

TEST_P(CudaRing, NothingIsAllocatedOnceTheRingIsMade) {
  expect_ok(world_->make_ring(small_ring()));
  world_->fill_equal((128_KiB).count(), 1);
  exchange_both();
  world_->finish();
  std::vector<std::uint64_t> before;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    before.push_back(world_->device(rank).memory()->free.count());
    before.push_back(world_->pool(rank).usage().live.count());
  }
  for (int i = 0; i < 20; ++i) exchange_both();
  world_->finish();
  std::vector<std::uint64_t> after;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    after.push_back(world_->device(rank).memory()->free.count());
    after.push_back(world_->pool(rank).usage().live.count());
  }
  EXPECT_EQ(after, before);
}

TEST_P(CudaRing, AnOverflowIsToldToBothAndTheRingGoesOn) {
  expect_ok(world_->make_ring(small_ring()));
  world_->fill({{16, (700_KiB).count()}, {32, 48}}, 1);
  exchange_both();
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    expect_ok(world_->device(rank).synchronize(world_->stream(rank)));
    const Status told = world_->ring(rank).check();
    ASSERT_FALSE(told.ok()) << "rank " << rank;
    EXPECT_THAT(told.error().text, HasSubstr("channel 0->1, slot 0, epoch 0"));
  }
  world_->fill_equal(5008, 2);
  exchange_both();
  world_->finish();
  for (std::uint32_t rank = 0; rank < 2; ++rank) world_->expect_received(rank);
}

TEST_P(CudaRing, ARankThatNeverShowsUpIsNamedAndNothingHangs) {
  RingOptions options = small_ring();
  options.timeout = std::chrono::milliseconds(50);
  expect_ok(world_->make_ring(options));
  world_->fill_equal(1024, 1);
  expect_ok(world_->ring(1).exchange(world_->stream(1), world_->parts(1), world_->room(1)));
  expect_ok(world_->device(1).synchronize(world_->stream(1)));
  const Status told = world_->ring(1).check();
  ASSERT_FALSE(told.ok());
  EXPECT_EQ(told.error().code, Errc::kTimeout);
  EXPECT_THAT(
      told.error().text,
      HasSubstr("rank 1 waits for rank 0: channel 0->1, slot 0, epoch 0, head 0, tail 0: no message"));
}

}  // namespace
}  // namespace terrace
