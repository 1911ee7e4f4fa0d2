// What the two classes of copies owe each other: windows, priorities, promotion, caps, failures on the way.
#include "runtime/copy_queue.hpp"

#include <array>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/runtime/copy_counting_device.hpp"
#include "tests/runtime/copy_fixture.hpp"

namespace terrace {
namespace {

constexpr auto kNever = std::chrono::hours(1);  // to look again: so that only signals wake the engine

class CopyQueueTest : public CopyFixture {
 protected:
  void SetUp() override {
    metrics().clear();
    CopyFixture::SetUp();
    counting_ = std::make_unique<CopyCountingDevice>(*device_);
    engine_ =
        CopyEngine::create(*counting_, {.chunk = kBlock, .window = 2 * kBlock, .look_again = kNever}).value();
  }
  void TearDown() override {
    counting_->let_all();
    engine_.reset();
    counting_.reset();
    CopyFixture::TearDown();
  }
  [[nodiscard]] static CopyEngine::Request background(Event after = {}) {
    return {.direction = Direction::kD2H,
            .after = after,
            .reason = CopyReason::kOffload,
            .priority = CopyPriority::kBackground};
  }
  [[nodiscard]] static CopyEngine::Request urgent(Event after = {}) {
    return {.direction = Direction::kD2H, .after = after, .reason = CopyReason::kRestore};
  }
  [[nodiscard]] CopyEngine::Ticket submit(const CopyEngine::Request& request, const Transfer& piece) {
    return engine_->submit(request, std::array{piece}).value();
  }
  [[nodiscard]] Bytes held() const { return engine_->held_back(Direction::kD2H); }

  std::unique_ptr<CopyCountingDevice> counting_;
  std::unique_ptr<CopyEngine> engine_;
};

TEST_F(CopyQueueTest, ALargeBackgroundCopyGoesOutAWindowAtATime) {
  counting_->hold_copies();
  fill(hbm(0), 5, 8);
  std::promise<void> finished;
  CopyEngine::Request request = background();
  request.on_done = [&](const Status& status) {
    EXPECT_TRUE(status.ok());
    finished.set_value();
  };
  const auto ticket = submit(request, down(0, 8));
  ASSERT_EQ(counting_->batches().size(), 2U) << "by the submitter itself, at once";
  EXPECT_EQ(held(), 6 * kBlock);
  EXPECT_EQ(metrics().value<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kOffload),
            (2 * kBlock).count());
  const Stream lane = counting_->batches()[0].stream;
  counting_->let(lane, 8);
  finished.get_future().wait();  // nobody waits for the ticket: the engine's own thread sent the rest
  EXPECT_TRUE(ticket.done());
  EXPECT_TRUE(all(host(0), 5, 8));
  EXPECT_EQ(counting_->batches().size(), 8U);
  for (const auto& batch : counting_->batches()) EXPECT_EQ(batch.stream, lane);
  EXPECT_EQ(counting_->most_under_way(lane), 2 * kBlock);
  EXPECT_EQ(held(), 0_B);
  EXPECT_EQ(metrics().value<Metric::kTransferBytes>(Direction::kD2H, CopyReason::kOffload),
            (8 * kBlock).count());
}

// A window that is topped up only once it is empty costs the link a gap each time.
TEST_F(CopyQueueTest, EachChunkThatArrivesMakesRoomForTheNext) {
  counting_->hold_copies();
  const auto ticket = submit(background(), down(0, 8));
  const Stream lane = counting_->batches()[0].stream;
  for (std::size_t arrived = 1; arrived <= 6; ++arrived) {
    counting_->let(lane, 1);
    while (counting_->batches().size() < 2 + arrived) std::this_thread::yield();
  }
  EXPECT_GE(counting_->watched(), 6);
  counting_->let_all();
  EXPECT_TRUE(ticket.synchronize().ok());
}

TEST_F(CopyQueueTest, SmallPiecesAreGatheredAndLargeOnesCut) {
  counting_->hold_copies();
  fill(hbm(0), 6, 4);
  std::vector<Transfer> pieces;
  const Bytes small = kBlock / 16;
  for (std::uint64_t i = 0; i < 24; ++i) {
    pieces.push_back({host(0) + i * small.count(), hbm(0) + i * small.count(), small});
    pieces.push_back({host(0), hbm(0), 0_B});
  }
  const Bytes rest = 4 * kBlock - 24 * small;
  pieces.push_back({host(0) + (24 * small).count(), hbm(0) + (24 * small).count(), rest});
  const auto ticket = engine_->submit(background(), pieces).value();
  EXPECT_EQ(ticket.bytes(), 4 * kBlock);
  counting_->let_all();
  while (held() > 0_B) std::this_thread::yield();
  ASSERT_TRUE(ticket.synchronize().ok());
  EXPECT_TRUE(all(host(0), 6, 4));
  const auto batches = counting_->batches();
  ASSERT_EQ(batches.size(), 4U);
  EXPECT_EQ(batches[0].pieces, 16U);
  EXPECT_EQ(batches[1].pieces, 9U) << "eight small ones and the head of the large one";
  EXPECT_EQ(batches[2].pieces, 1U);
  for (const auto& batch : batches) EXPECT_EQ(batch.bytes, kBlock);
}

TEST_F(CopyQueueTest, WithNothingHeldBackTheEnginesThreadSleeps) {
  for (std::uint64_t i = 0; i < 4; ++i) {
    auto ticket = submit(i % 2 == 0 ? background() : urgent(), down(i));
    ASSERT_TRUE(ticket.synchronize().ok());
  }
  EXPECT_EQ(counting_->watched(), 0) << "no chunk is watched that nobody needs to know of";
  EXPECT_EQ(device_->live_streams(), 1 + 4) << "compute, and a lane a class and direction";
}

TEST_F(CopyQueueTest, AnUrgentCopyPassesWhatIsHeldBack) {
  counting_->hold_copies();
  std::vector<std::string> order;
  std::promise<void> finished;
  CopyEngine::Request slow = background();
  slow.on_done = [&](const Status&) {
    order.emplace_back("background");
    finished.set_value();
  };
  CopyEngine::Request late = urgent();
  late.on_done = [&](const Status&) { order.emplace_back("urgent"); };
  const auto spilled = submit(slow, down(0, 8));
  const Stream behind = counting_->batches().back().stream;
  const auto restored = submit(late, down(8, 4));
  ASSERT_EQ(counting_->batches().size(), 3U) << "whole, at once";
  EXPECT_EQ(counting_->batches().back().bytes, 4 * kBlock);
  const Stream lane = counting_->batches().back().stream;
  EXPECT_NE(lane, behind);
  counting_->let(lane, 1);
  EXPECT_TRUE(restored.synchronize().ok()) << "though nothing of the other has moved";
  EXPECT_EQ(held(), 6 * kBlock);
  EXPECT_FALSE(spilled.done());
  counting_->let(behind, 8);
  finished.get_future().wait();
  EXPECT_EQ(order, (std::vector<std::string>{"urgent", "background"}));
}

// A copy engine stays with a stream that always has more: what waits for it must see the background run dry.
TEST_F(CopyQueueTest, NothingGoesOutInTheBackgroundWhileAnUrgentCopyCouldStart) {
  counting_->hold_copies();
  const auto spilled = submit(background(), down(0, 8));
  const Stream behind = counting_->batches().back().stream;
  const auto first = submit(urgent(), down(8));
  const Stream lane = counting_->batches().back().stream;
  const auto second = submit(urgent(), down(9));  // could start, but for the first
  ASSERT_EQ(counting_->batches().size(), 4U);
  counting_->let(behind, 2);
  while (counting_->most_under_way(behind) == 0_B || counting_->under_way(behind) > 0_B)
    std::this_thread::yield();
  EXPECT_FALSE(spilled.done());  // looks, and finds two chunks arrived
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(counting_->batches().size(), 4U) << "there is room, but not for this";
  counting_->let(lane, 1);  // the first arrives, the second begins
  while (counting_->batches().size() < 6) std::this_thread::yield();
  counting_->let_all();
  EXPECT_TRUE(second.synchronize().ok());
  EXPECT_TRUE(spilled.synchronize().ok());
}

TEST_F(CopyQueueTest, AnUrgentCopyThatMayNotStartHoldsUpNobody) {
  Gate gate(*device_, compute_);
  const auto later = submit(urgent(gate.event()), down(8));
  std::promise<void> finished;
  CopyEngine::Request request = background();
  request.on_done = [&](const Status& status) {
    EXPECT_TRUE(status.ok());
    finished.set_value();
  };
  const auto spilled = submit(request, down(0, 8));
  finished.get_future().wait();
  EXPECT_FALSE(later.done());
  gate.open();
  EXPECT_TRUE(later.synchronize().ok());
}

TEST_F(CopyQueueTest, ABackgroundCopyThatMayNotStartHoldsUpNobodyUrgent) {
  Gate gate(*device_, compute_);
  const auto first = submit(background(gate.event()), down(0, 2));
  const auto second = submit(background(gate.event()), down(2, 2));
  EXPECT_EQ(held(), 2 * kBlock);
  EXPECT_TRUE(submit(urgent(), down(8)).synchronize().ok());
  EXPECT_FALSE(first.done());
  gate.open();
  EXPECT_TRUE(second.synchronize().ok());
}

TEST_F(CopyQueueTest, WhatWaitsForItsEventDoesNotHoldUpThoseHeldBackBeforeIt) {
  counting_->hold_copies();
  fill(hbm(0), 4, 6);
  const auto before = submit(background(), down(0, 4));
  const Stream lane = counting_->batches()[0].stream;
  Gate gate(*device_, compute_);
  const auto gated = submit(background(gate.event()), down(4, 2));
  // Its place among the events is kept: a new recording is not its business.
  ASSERT_TRUE(device_->record(lane, gate.event()).ok());
  counting_->let(lane, 4);
  while (!before.done()) std::this_thread::yield();
  EXPECT_TRUE(all(host(0), 4, 4));
  counting_->let_all();
  EXPECT_FALSE(gated.done());
  EXPECT_TRUE(all(host(4), 0, 2)) << "the gate is shut";
  gate.open();
  EXPECT_TRUE(gated.synchronize().ok());
  EXPECT_TRUE(all(host(4), 4, 2));
}

TEST_F(CopyQueueTest, WhoWaitsPromotes) {
  fill(hbm(0), 8, 8);
  for (const bool on_the_device : {false, true}) {
    fill(host(0), 0, 8);
    Gate gate(*device_, compute_);
    const auto ahead = submit(background(gate.event()), down(8, 8));
    const auto wanted = submit(background(), down(0, 8));
    const std::size_t sent = counting_->batches().size();
    EXPECT_EQ(held(), 14 * kBlock);
    std::byte seen{0};
    const Stream user = *device_->create_stream(StreamPriority::kNormal);
    // The one ahead of it is not let through, and does not matter.
    if (on_the_device) {
      ASSERT_TRUE(wanted.order_before(user).ok());
      ASSERT_TRUE(device_->launch_host(user, [&seen, last = host(8) - 1] { seen = *last; }).ok());
      ASSERT_TRUE(device_->synchronize(user).ok());
      EXPECT_EQ(seen, std::byte{8});
    } else {
      ASSERT_TRUE(wanted.synchronize().ok());
    }
    EXPECT_TRUE(wanted.done());
    EXPECT_TRUE(all(host(0), 8, 8));
    EXPECT_EQ(counting_->batches().size(), sent + 1) << "whole";
    EXPECT_EQ(held(), 6 * kBlock);
    EXPECT_FALSE(ahead.done());
    gate.open();
    EXPECT_TRUE(ahead.synchronize().ok());
    device_->destroy_stream(user);
  }
}

TEST_F(CopyQueueTest, APromotedRestWaitsForItsOwnEvent) {
  fill(hbm(0), 1, 8);
  Gate gate(*device_, compute_);
  ASSERT_TRUE(device_->fill(compute_, hbm(0), 2, 8 * kBlock).ok());
  ASSERT_TRUE(device_->record(compute_, gate.event()).ok());
  const auto started = submit(background(gate.event()), down(0, 4));
  const auto held_whole = submit(background(gate.event()), down(4, 4));
  ASSERT_TRUE(started.promote().ok());
  ASSERT_TRUE(held_whole.promote().ok());
  EXPECT_EQ(held(), 0_B);
  EXPECT_FALSE(started.done() || held_whole.done());
  gate.open();
  ASSERT_TRUE(started.synchronize().ok());
  ASSERT_TRUE(held_whole.synchronize().ok());
  EXPECT_TRUE(all(host(0), 2, 8)) << "what was there before the event was not copied";
  EXPECT_GT(*engine_->seconds(started), 0);
}

// A copy goes out at once, and just then an urgent one becomes ready: the lane waits for the copy's event and
// must be known to. Without the copy in it, it would pass for free, and hold up the next.
TEST_F(CopyQueueTest, ALaneThatWaitsForAnEventIsNeverTakenForFree) {
  fill(hbm(0), 1, 3);
  counting_->hold_copies();
  const Stream other = *device_->create_stream(StreamPriority::kNormal);
  Gate soon(*device_, other);
  const auto moving = submit(urgent(soon.event()), down(8));
  const Stream lane = counting_->batches()[0].stream;
  const auto behind = submit(urgent(soon.event()), down(9));
  Gate gate(*device_, compute_);
  ASSERT_TRUE(device_->fill(compute_, hbm(0), 2, 2 * kBlock).ok());
  ASSERT_TRUE(device_->record(compute_, gate.event()).ok());
  counting_->before_next_wait([&] {
    soon.open();
    ASSERT_TRUE(device_->synchronize(other).ok());
    ASSERT_TRUE(device_->synchronize(counting_->created().back()).ok());
    while (counting_->at_the_turn(lane) == 0) std::this_thread::yield();
  });
  const auto gated = submit(background(gate.event()), down(0, 2));
  ASSERT_TRUE(gated.promote().ok());
  counting_->let_all();
  ASSERT_TRUE(behind.synchronize().ok());
  ASSERT_TRUE(moving.synchronize().ok());
  ASSERT_TRUE(submit(background(), down(2)).synchronize().ok())
      << "it waits for no event, whichever are shut";
  EXPECT_FALSE(gated.done());
  gate.open();
  ASSERT_TRUE(gated.synchronize().ok());
  EXPECT_TRUE(all(host(0), 2, 2)) << "what was there before the event was copied";
  EXPECT_TRUE(all(host(2), 1, 1));
  device_->destroy_stream(other);
}

TEST_F(CopyQueueTest, AnUrgentCopyPassesOneWhoseGateIsShut) {
  Gate gate(*device_, compute_);
  const auto later = submit(urgent(gate.event()), down(8));
  EXPECT_TRUE(submit(urgent(), down(9)).synchronize().ok());
  EXPECT_FALSE(later.done());
  gate.open();
  EXPECT_TRUE(later.synchronize().ok());
}

// Whether it has begun or not: what is asked for first waits for its own gate.
TEST_F(CopyQueueTest, APromotedCopyPassesThoseBehindTheGatesOfOthers) {
  for (const bool first : {false, true}) {
    const Stream other = *device_->create_stream(StreamPriority::kNormal);
    Gate shut(*device_, compute_);
    Gate soon(*device_, other);
    std::optional<CopyEngine::Ticket> ahead, wanted;
    const auto submit_ahead = [&] { ahead = submit(background(shut.event()), down(0)); };
    const auto submit_wanted = [&] { wanted = submit(background(soon.event()), down(8)); };
    if (!first) submit_ahead();
    submit_wanted();
    if (first) submit_ahead();
    ASSERT_TRUE(ahead->promote().ok());
    ASSERT_TRUE(wanted->promote().ok());
    EXPECT_FALSE(wanted->done());
    soon.open();
    EXPECT_TRUE(wanted->synchronize().ok());
    EXPECT_FALSE(ahead->done());
    shut.open();
    EXPECT_TRUE(ahead->synchronize().ok());
    device_->destroy_stream(other);
  }
}

// Both are behind the compute stream; the later one is asked for first.
TEST_F(CopyQueueTest, ACopyAskedForOutOfOrderLeavesTheEarlierGateItsOwnLane) {
  Gate early(*device_, compute_);
  const Event fence = *device_->create_event();
  ASSERT_TRUE(device_->record(compute_, fence).ok());
  const auto first = submit(background(fence), down(0, 2));  // fills the window
  const auto planned = submit(background(fence), down(2));
  Gate late(*device_, compute_);
  ASSERT_TRUE(device_->record(compute_, fence).ok());
  const auto asked_for = submit(urgent(fence), down(8));
  const Stream lane = counting_->batches().back().stream;
  ASSERT_TRUE(planned.promote().ok());
  EXPECT_NE(counting_->batches().back().stream, lane);
  early.open();
  EXPECT_TRUE(first.synchronize().ok());
  EXPECT_TRUE(planned.synchronize().ok());
  EXPECT_FALSE(asked_for.done());
  late.open();
  EXPECT_TRUE(asked_for.synchronize().ok());
  device_->destroy_event(fence);
}

TEST_F(CopyQueueTest, CopiesInOrderBehindOneEventShareALane) {
  Gate gate(*device_, compute_);
  std::vector<CopyEngine::Ticket> tickets;
  for (std::uint64_t i = 0; i < 4; ++i) tickets.push_back(submit(urgent(gate.event()), down(i)));
  for (const auto& batch : counting_->batches()) EXPECT_EQ(batch.stream, counting_->batches()[0].stream);
  EXPECT_EQ(device_->live_streams(), 1 + 4 + 2) << "a gated lane, and the stream of its gates";
  gate.open();
  for (const auto& ticket : tickets) EXPECT_TRUE(ticket.synchronize().ok());
}

TEST_F(CopyQueueTest, ACapHoldsBackgroundCopiesAndNotUrgentOnes) {
  fill(hbm(0), 3, 16);
  engine_->set_cap(Direction::kD2H, 1);  // a byte a second
  EXPECT_EQ(engine_->cap(Direction::kD2H), 1);
  EXPECT_EQ(engine_->cap(Direction::kH2D), 0);
  std::promise<void> finished;
  CopyEngine::Request request = background();
  request.on_done = [&](const Status&) { finished.set_value(); };
  const auto capped = submit(request, down(0, 8));
  EXPECT_EQ(counting_->batches().size(), 1U) << "the first piece owes the rest its time";
  EXPECT_EQ(held(), 7 * kBlock);
  ASSERT_TRUE(submit(urgent(), down(8, 8)).synchronize().ok());
  EXPECT_EQ(held(), 7 * kBlock);
  EXPECT_TRUE(all(host(8), 3, 8));
  EXPECT_FALSE(capped.done());
  engine_->set_cap(Direction::kD2H, 0);
  finished.get_future().wait();
  EXPECT_TRUE(all(host(0), 3, 8));
}

TEST_F(CopyQueueTest, ACapLetsTheRestGoInTime) {
  engine_->set_cap(Direction::kD2H, 10e6);
  std::promise<void> finished;
  CopyEngine::Request request = background();
  request.on_done = [&](const Status&) { finished.set_value(); };
  const auto capped = submit(request, down(0, 8));
  EXPECT_GT(held(), 0_B);
  finished.get_future().wait();  // nothing but the clock wakes the engine for the next piece
  EXPECT_TRUE(capped.done());
}

TEST_F(CopyQueueTest, UrgentBytesArePaidForByBackgroundOnes) {
  engine_->set_cap(Direction::kD2H, 1);
  const auto first = submit(urgent(), down(0));
  const auto second = submit(background(), down(1));
  EXPECT_EQ(held(), kBlock);
  EXPECT_TRUE(second.synchronize().ok()) << "promoted";
}

TEST_F(CopyQueueTest, WhatIsCancelledNeverMoves) {
  fill(hbm(0), 9, 8);
  Gate gate(*device_, compute_);
  std::promise<Errc> told;
  CopyEngine::Request request = background(gate.event());
  request.on_done = [&](const Status& status) { told.set_value(status.error().code); };
  const auto ticket = submit(request, down(0, 8));
  ticket.cancel();
  EXPECT_EQ(held(), 0_B);
  EXPECT_FALSE(ticket.done()) << "two pieces were on the device";
  gate.open();
  EXPECT_EQ(told.get_future().get(), Errc::kCancelled);
  EXPECT_TRUE(ticket.done());
  EXPECT_EQ(ticket.synchronize().error().code, Errc::kCancelled);
  EXPECT_EQ(ticket.order_before(compute_).error().code, Errc::kCancelled);
  EXPECT_TRUE(all(host(0), 9, 2));
  EXPECT_TRUE(all(host(2), 0, 6));
}

TEST_F(CopyQueueTest, APieceThatFailsOnTheWayIsItsTicketsAlone) {
  counting_->hold_copies();
  fill(hbm(0), 7, 8);
  std::promise<Errc> told;
  CopyEngine::Request request = background();
  request.on_done = [&](const Status& status) { told.set_value(status.error().code); };
  const auto failing = submit(request, down(0, 4));
  const auto next = submit(background(), down(4, 4));
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceCopy, 1));
    counting_->let(counting_->batches()[0].stream, 1);
    while (!faults.fired()) std::this_thread::yield();  // the engine's thread met it
  }
  counting_->let_all();
  EXPECT_EQ(told.get_future().get(), Errc::kIo);
  EXPECT_EQ(failing.synchronize().error().code, Errc::kIo);
  EXPECT_EQ(failing.order_before(compute_).error().code, Errc::kIo);
  EXPECT_EQ(engine_->seconds(failing).error().code, Errc::kIo);
  EXPECT_TRUE(next.synchronize().ok());
  EXPECT_TRUE(all(host(4), 7, 4));
}

TEST_F(CopyQueueTest, AFailedStreamIsAsNewOnceItsCopiesHaveEnded) {
  engine_.reset();
  engine_ = CopyEngine::create(*counting_, {.chunk = kBlock, .window = 2 * kBlock}).value();
  const Stream broken = *device_->create_stream(StreamPriority::kNormal);
  const Event never = *device_->create_event();
  ASSERT_TRUE(device_->launch_host(broken, [] { throw std::runtime_error("bad kernel"); }).ok());
  ASSERT_TRUE(device_->record(broken, never).ok());
  std::promise<Errc> told;
  CopyEngine::Request request = background(never);
  request.on_done = [&](const Status& status) { told.set_value(status.error().code); };
  {
    const auto failed = submit(request, down(0, 8));
    EXPECT_EQ(told.get_future().get(), Errc::kIo) << "though its signal went the way of its copy";
    EXPECT_FALSE(failed.synchronize().ok());
    EXPECT_FALSE(submit(urgent(never), down(8)).synchronize().ok());
  }
  fill(hbm(0), 2, 8);
  const auto background_again = submit(background(), down(0, 4));
  const auto urgent_again = submit(urgent(), down(4, 4));
  EXPECT_TRUE(background_again.synchronize().ok());
  EXPECT_TRUE(urgent_again.synchronize().ok());
  EXPECT_TRUE(all(host(0), 2, 8));
  device_->destroy_event(never);
  device_->destroy_stream(broken);
}

}  // namespace
}  // namespace terrace
