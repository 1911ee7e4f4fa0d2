// Background copies and the link that they share: leases followed live, collectives given way to.
#include <gtest/gtest.h>

#include <array>
#include <future>

#include "runtime/collectives.hpp"
#include "runtime/copy_engine.hpp"
#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/runtime/copy_fixture.hpp"

namespace terrace {
namespace {

constexpr double kRate = 8e9;  // the emulated link's, as it states

class CopyLinkTest : public CopyFixture {
 protected:
  void SetUp() override {
    metrics().clear();
    CopyFixture::SetUp();
    engine_ = CopyEngine::create(*device_, {.chunk = kBlock, .window = kBlock}).value();
    board_ = *LinkBoard::create();
  }
  void TearDown() override {
    engine_.reset();
    CopyFixture::TearDown();
  }
  void take_seat(std::uint32_t usable) {
    board_->note_look(steady_clock().now());
    for (auto& part : own().usable) part = usable;
    device_->link_time().take_seat(board_, 4);
  }
  [[nodiscard]] LinkSlot& own() const { return board_->slots()[4]; }
  [[nodiscard]] CopyEngine::Ticket spill(std::uint64_t blocks, std::function<void(const Status&)> done = {}) {
    return engine_
        ->submit({.direction = Direction::kD2H,
                  .reason = CopyReason::kSpill,
                  .priority = CopyPriority::kBackground,
                  .on_done = std::move(done)},
                 std::array{down(0, blocks)})
        .value();
  }
  [[nodiscard]] static std::uint64_t held_nanoseconds(LinkHold hold) {
    return metrics().value<Metric::kLinkHeld>(Direction::kD2H, hold);
  }

  std::unique_ptr<CopyEngine> engine_;
  std::shared_ptr<LinkBoard> board_;
};

TEST_F(CopyLinkTest, TheLeaseIsTheCapOfEachDirectionAndFollowedLive) {
  EXPECT_EQ(engine_->cap(Direction::kD2H), 0);
  take_seat(kLinkWhole / 4);
  own().usable[0] = kLinkWhole / 2;
  engine_->set_cap(Direction::kD2H, 0);  // looks
  engine_->set_cap(Direction::kH2D, 0);
  EXPECT_DOUBLE_EQ(engine_->cap(Direction::kD2H), kRate / 4);
  EXPECT_DOUBLE_EQ(engine_->cap(Direction::kH2D), kRate / 2);
  own().usable[1] = kLinkWhole / 8;
  EXPECT_TRUE(spill(2).synchronize().ok());
  EXPECT_DOUBLE_EQ(engine_->cap(Direction::kD2H), kRate / 8);
  // A cap of one's own that is smaller stays.
  engine_->set_cap(Direction::kD2H, kRate / 100);
  EXPECT_DOUBLE_EQ(engine_->cap(Direction::kD2H), kRate / 100);
  engine_->set_cap(Direction::kD2H, kRate);
  EXPECT_DOUBLE_EQ(engine_->cap(Direction::kD2H), kRate / 8);
  device_->link_time().leave_seat(board_.get());
  engine_->set_cap(Direction::kD2H, 0);
  EXPECT_EQ(engine_->cap(Direction::kD2H), 0);
}

TEST_F(CopyLinkTest, ADeviceMayShareTheSeatOfSomebodyElseInTheProcess) {
  LinkTime of_the_process;
  const auto device = EmulatedDevice::create({.capacity = 1_MiB}).value();
  device->share_link_time(of_the_process);
  const auto engine = CopyEngine::create(*device).value();
  board_->note_look(steady_clock().now());
  own().usable[1] = kLinkWhole / 2;
  of_the_process.take_seat(board_, 4);
  engine->set_cap(Direction::kD2H, 0);  // looks
  EXPECT_DOUBLE_EQ(engine->cap(Direction::kD2H), kRate / 2);
}

TEST_F(CopyLinkTest, WhoIsHeldBackByItsLeaseSaysSoAndWhatItSpent) {
  take_seat(1);  // the least there is: a chunk of 64 KiB owes 2 ms
  // Where a chunk takes the machine longer than it owes, none is held back.
  for (int attempt = 0; attempt < 100 && own().limited_at[1].load() == 0; ++attempt) {
    std::promise<void> done;
    const auto ticket = spill(4, [&](const Status& status) {
      EXPECT_TRUE(status.ok());
      done.set_value();
    });
    EXPECT_GT(engine_->held_back(Direction::kD2H), 0_B);
    done.get_future().wait();
    EXPECT_TRUE(ticket.done());
  }
  EXPECT_GT(own().limited_at[1].load(), 0U);
  EXPECT_EQ(own().limited_at[0].load(), 0U);
  EXPECT_GT(own().spent[1].load(), 0U);
  EXPECT_GT(held_nanoseconds(LinkHold::kLease), 0U);
  EXPECT_EQ(held_nanoseconds(LinkHold::kCollective), 0U);
}

TEST_F(CopyLinkTest, SpillsWaitForACollectiveOfAnotherProcessAndUrgentCopiesDoNot) {
  take_seat(kLinkWhole);
  board_->slots()[9].lanes[0].begun = 1;
  std::promise<void> done;
  const auto ticket = spill(1, [&](const Status&) { done.set_value(); });
  EXPECT_EQ(engine_->held_back(Direction::kD2H), kBlock);
  const auto restored =
      engine_->submit({.direction = Direction::kH2D, .reason = CopyReason::kRestore}, std::array{up(8)});
  ASSERT_TRUE(restored.ok());
  EXPECT_TRUE(restored->synchronize().ok());
  const auto fetched =
      engine_->submit({.direction = Direction::kD2H, .reason = CopyReason::kRestore}, std::array{down(9)});
  ASSERT_TRUE(fetched.ok());
  EXPECT_TRUE(fetched->synchronize().ok());
  board_->slots()[9].lanes[0].ended = 1;
  done.get_future().wait();
  EXPECT_GT(held_nanoseconds(LinkHold::kCollective), 0U);
  EXPECT_EQ(held_nanoseconds(LinkHold::kLease), 0U);
}

TEST_F(CopyLinkTest, ACollectiveThatNeverEndsHoldsNobodyForEver) {
  take_seat(kLinkWhole);
  board_->slots()[9].lanes[0].begun = 1;  // and who announced it has died
  fill(hbm(0), 7, 3);
  std::promise<void> done;
  const auto ticket = spill(3, [&](const Status& status) {
    EXPECT_TRUE(status.ok());
    done.set_value();
  });
  done.get_future().wait();
  EXPECT_TRUE(all(host(0), 7, 3));
}

TEST_F(CopyLinkTest, WhoWaitsForASpillIsNotKeptWaitingByACollective) {
  take_seat(1);
  board_->slots()[9].lanes[0].begun = 1;
  const auto ticket = spill(16);
  EXPECT_GT(engine_->held_back(Direction::kD2H), 0_B);
  EXPECT_TRUE(ticket.synchronize().ok());
  EXPECT_EQ(engine_->held_back(Direction::kD2H), 0_B);
}

TEST_F(CopyLinkTest, ACollectiveIsAnnouncedInTheOrderOfItsStream) {
  take_seat(kLinkWhole);
  Collectives collectives(*device_);
  const CollectiveLane& lane = own().lanes[0];
  {
    Gate before(*device_, compute_);
    {
      const auto announced = collectives.announce(compute_);
      Gate collective(*device_, compute_);
      EXPECT_EQ(lane.begun, 0U) << "the device has not come to it";
      before.open();
      ASSERT_TRUE(device_->synchronize(before.event()).ok());
      while (lane.begun == 0) std::this_thread::yield();
      EXPECT_EQ(lane.ended, 0U);
    }
    ASSERT_TRUE(device_->synchronize(compute_).ok());
    EXPECT_EQ(lane.ended, lane.begun);
  }
  EXPECT_EQ(metrics().value<Metric::kCollectives>(), 1U);
}

TEST_F(CopyLinkTest, WithoutADaemonAProcessHearsItself) {
  Collectives collectives(*device_);
  Gate collective(*device_, compute_);
  LinkView view(device_->link_time(), 1);
  {
    const auto announced = collectives.announce(compute_);
    (void)announced;
  }
  collective.open();
  ASSERT_TRUE(device_->synchronize(compute_).ok());
  const auto seat = device_->link_time().seat();
  ASSERT_NE(seat.board, nullptr);
  EXPECT_EQ(seat.own().lanes[0].begun, 1U);
  EXPECT_EQ(seat.own().lanes[0].ended, 1U);
  EXPECT_FALSE(view.collective_runs(steady_clock().now()));
}

TEST_F(CopyLinkTest, WhereNobodyListensNothingIsAnnounced) {
  engine_.reset();
  Collectives collectives(*device_);
  { const auto announced = collectives.announce(compute_); }
  ASSERT_TRUE(device_->synchronize(compute_).ok());
  EXPECT_EQ(metrics().value<Metric::kCollectives>(), 0U);
  EXPECT_EQ(device_->link_time().seat().board, nullptr);
}

TEST_F(CopyLinkTest, AnnouncementsFollowTheProcessToAnotherBoard) {
  take_seat(kLinkWhole);
  Collectives collectives(*device_), others(*device_);
  { const auto announced = collectives.announce(compute_); }
  const auto first = board_;
  board_ = *LinkBoard::create();
  {
    const auto announced = others.announce(compute_);
    take_seat(kLinkWhole);  // meanwhile
  }
  { const auto announced = collectives.announce(compute_); }
  ASSERT_TRUE(device_->synchronize(compute_).ok());
  EXPECT_EQ(first->slots()[4].lanes[1].ended, 1U) << "it ends where it began";
  EXPECT_EQ(first->slots()[4].lanes[0].ended, 1U);
  EXPECT_EQ(own().lanes[0].begun, 2U);
  EXPECT_EQ(own().lanes[0].ended, 2U);
}

TEST_F(CopyLinkTest, AnnouncingFailsNobodyWhicheverCallFails) {
  take_seat(kLinkWhole);
  for (std::uint64_t nth = 1;; ++nth) {
    const ScopedFaults faults(fail_call(nth));
    Collectives collectives(*device_);
    { const auto announced = collectives.announce(compute_); }
    { const auto announced = collectives.announce(compute_); }
    ASSERT_TRUE(device_->synchronize(compute_).ok()) << nth;
    if (!faults.fired()) break;
  }
}

}  // namespace
}  // namespace terrace
