#include "runtime/copy_engine.hpp"

#include <array>
#include <atomic>
#include <set>
#include <thread>

#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/runtime/copy_fixture.hpp"

namespace terrace {
namespace {

class CopyEngineTest : public CopyFixture {
 protected:
  void SetUp() override {
    metrics().clear();
    CopyFixture::SetUp();
  }
  // What the metrics say was sent since the test began.
  [[nodiscard]] static Bytes moved(Direction direction, CopyReason reason) {
    return Bytes(metrics().value<Metric::kTransferBytes>(direction, reason));
  }
};

CopyEngine::Request restore(Event after = {}) {
  return {.direction = Direction::kH2D, .after = after, .reason = CopyReason::kRestore};
}
CopyEngine::Request spill(Event after = {}) {
  return {.direction = Direction::kD2H, .after = after, .reason = CopyReason::kSpill};
}

TEST_F(CopyEngineTest, ABatchIsDoneWhenItsTicketIs) {
  auto engine = CopyEngine::create(*device_).value();
  fill(hbm(0), 1);
  fill(hbm(1), 2);
  const std::array batch = {Transfer{.to = host(0), .from = hbm(1), .size = kBlock},
                            Transfer{.to = host(1), .from = hbm(0), .size = kBlock}};
  auto ticket = engine->submit(spill(), batch);
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(ticket->valid());
  EXPECT_EQ(ticket->bytes(), 2 * kBlock);
  ASSERT_TRUE(ticket->synchronize().ok());
  EXPECT_TRUE(ticket->done());
  EXPECT_TRUE(all(host(0), 2));
  EXPECT_TRUE(all(host(1), 1));
  const double seconds = *engine->seconds(*ticket);
  EXPECT_GT(seconds, 0);
  { const auto gone = std::move(*ticket); }
  EXPECT_EQ(metrics().value<Metric::kTransferSeconds>(Direction::kD2H, CopyReason::kSpill),
            detail::nanoseconds_of(seconds));
  EXPECT_EQ(moved(Direction::kD2H, CopyReason::kSpill), 2 * kBlock);
  EXPECT_EQ(metrics().value<Metric::kTransfers>(Direction::kD2H, CopyReason::kSpill), 1U) << "a batch is one";
  EXPECT_EQ(moved(Direction::kD2H, CopyReason::kRestore), 0_B);
  EXPECT_EQ(moved(Direction::kH2D, CopyReason::kSpill), 0_B);
}

TEST_F(CopyEngineTest, StartsOnlyAfterTheEventAndOthersWaitForTheTicket) {
  auto engine = CopyEngine::create(*device_).value();
  for (const CopyPriority priority : {CopyPriority::kUrgent, CopyPriority::kBackground}) {
    const Stream producer = *device_->create_stream(StreamPriority::kNormal);
    Gate gate(*device_, producer);
    ASSERT_TRUE(device_->fill(producer, hbm(0), 9, kBlock).ok());
    ASSERT_TRUE(device_->record(producer, gate.event()).ok());
    CopyEngine::Request out = spill(gate.event());
    out.priority = priority;
    const auto spilled = engine->submit(out, std::array{down(0)});
    ASSERT_TRUE(spilled.ok());
    // The event's next recording is not this copy's business.
    ASSERT_TRUE(device_->record(compute_, gate.event()).ok());
    EXPECT_FALSE(spilled->done()) << "the producer is held";
    ASSERT_TRUE(spilled->order_before(compute_).ok());
    std::byte seen{0};
    ASSERT_TRUE(device_->launch_host(compute_, [&] { seen = host(0)[100]; }).ok());
    gate.open();
    ASSERT_TRUE(device_->synchronize(compute_).ok());
    EXPECT_EQ(seen, std::byte{9});
    device_->destroy_stream(producer);
    fill(host(0), 0);
  }
}

TEST_F(CopyEngineTest, BothDirectionsRunAtOnce) {
  auto engine = CopyEngine::create(*device_).value();
  Gate gate(*device_, compute_);
  const auto held = engine->submit(restore(gate.event()), std::array{up(0)});
  const auto free = engine->submit(spill(), std::array{down(1)});
  ASSERT_TRUE(held.ok() && free.ok());
  EXPECT_TRUE(free->synchronize().ok());
  EXPECT_FALSE(held->done());
  gate.open();
  EXPECT_TRUE(held->synchronize().ok());
}

TEST_F(CopyEngineTest, EventsAndStreamsAreUsedAgain) {
  auto engine = CopyEngine::create(*device_).value();
  const int streams = device_->live_streams();
  for (int i = 0; i < 50; ++i) {
    auto ticket = engine->submit(restore(), std::array{up(0)});
    ASSERT_TRUE(ticket.ok());
    CopyEngine::Ticket kept = std::move(ticket).value();
    ASSERT_TRUE(kept.synchronize().ok());
    kept = CopyEngine::Ticket();
    EXPECT_FALSE(kept.valid());
  }
  EXPECT_EQ(device_->live_events(), 2);
  EXPECT_EQ(device_->live_streams(), streams);
}

TEST_F(CopyEngineTest, RefusesWhatDoesNotCrossTheLink) {
  auto engine = CopyEngine::create(*device_).value();
  for (const Direction direction : {Direction::kD2D, Direction::kPeer}) {
    const auto refused = engine->submit({.direction = direction}, {});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
  }
  for (const CopyPriority priority : {CopyPriority::kUrgent, CopyPriority::kBackground}) {
    const auto empty = engine->submit({.direction = Direction::kH2D, .priority = priority}, {});
    ASSERT_TRUE(empty.ok());
    EXPECT_TRUE(empty->synchronize().ok());
    EXPECT_TRUE(empty->done());
  }
}

TEST_F(CopyEngineTest, RefusesAWindowThatHoldsNoChunk) {
  EXPECT_EQ(CopyEngine::create(*device_, {.chunk = 2_MiB, .window = 1_MiB}).error().code,
            Errc::kInvalidArgument);
  EXPECT_EQ(CopyEngine::create(*device_, {.chunk = 0_B, .window = 1_MiB}).error().code,
            Errc::kInvalidArgument);
}

TEST_F(CopyEngineTest, AFailedBatchMovesNothingLater) {
  for (const CopyPriority priority : {CopyPriority::kUrgent, CopyPriority::kBackground}) {
    auto engine = CopyEngine::create(*device_).value();
    fill(host(0), 1);
    bool told = false;
    {
      const std::array batch = {up(0), Transfer{.to = hbm(1), .from = host(0), .size = kBlock}};
      CopyEngine::Request request = restore();
      request.priority = priority;
      request.on_done = [&told](const Status&) { told = true; };
      const ScopedFaults faults(fail_call(FaultPoint::kDeviceCopy, 2));
      ASSERT_FALSE(engine->submit(request, batch).ok());
    }
    // The first transfer had been queued: it has ended, so what is written now stays.
    fill(hbm(0), 7);
    ASSERT_TRUE(engine->submit(restore(), {})->synchronize().ok());
    EXPECT_TRUE(all(hbm(0), 7));
    EXPECT_EQ(moved(Direction::kH2D, CopyReason::kRestore), 0_B);
    engine.reset();
    EXPECT_FALSE(told) << "who got no ticket has been told already";
  }
}

TEST_F(CopyEngineTest, ManyThreadsSubmit) {
  auto engine = CopyEngine::create(*device_, {.chunk = 16_KiB, .window = 32_KiB}).value();
  std::atomic<int> told{0};
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const int value = static_cast<int>(t + 1);
        fill(host(t), value);
        CopyEngine::Request out = spill();
        out.priority = CopyPriority::kBackground;
        out.on_done = [&told](const Status& status) { told += status.ok() ? 1 : 1000; };
        for (int i = 0; i < 10; ++i) {
          const auto sent = engine->submit(restore(), std::array{up(t)});
          ASSERT_TRUE(sent.ok());
          ASSERT_TRUE(sent->synchronize().ok());
          fill(host(t), 0);
          const auto back = engine->submit(out, std::array{down(t)});
          ASSERT_TRUE(back.ok());
          ASSERT_TRUE(back->synchronize().ok());
          EXPECT_TRUE(all(host(t), value));
        }
      });
    }
  }
  engine.reset();
  EXPECT_EQ(told, 40);
  EXPECT_EQ(moved(Direction::kH2D, CopyReason::kRestore), 40 * kBlock);
  EXPECT_EQ(moved(Direction::kD2H, CopyReason::kSpill), 40 * kBlock);
}

TEST_F(CopyEngineTest, OnDoneMaySubmitAgain) {
  auto engine = CopyEngine::create(*device_).value();
  std::promise<std::thread::id> finished;
  std::atomic<int> left{20};
  CopyEngine::Request request = spill();
  request.on_done = [&](const Status& status) {
    EXPECT_TRUE(status.ok());
    if (--left == 0) return finished.set_value(std::this_thread::get_id());
    EXPECT_TRUE(engine->submit(request, std::array{down(0)}).ok());
  };
  ASSERT_TRUE(engine->submit(request, std::array{down(0)}).ok());
  EXPECT_NE(finished.get_future().get(), std::this_thread::get_id());
  EXPECT_EQ(left, 0);
}

TEST_F(CopyEngineTest, DestroyedWithWorkInFlightItTellsEverybodyOnce) {
  fill(hbm(0), 3, kBlocks);
  fill(host(0), 0, kBlocks);
  Gate gate(*device_, compute_);
  auto engine = CopyEngine::create(*device_, {.chunk = kBlock, .window = 2 * kBlock}).value();
  CopyEngine& ending = *engine;
  std::vector<Errc> cancelled;
  int arrived = 0;
  CopyEngine::Request request = spill(gate.event());
  request.on_done = [&](const Status& status) {
    if (status.ok()) {
      ++arrived;
    } else {
      cancelled.push_back(status.error().code);
      EXPECT_EQ(ending.submit(request, std::array{down(0)}).error().code, Errc::kCancelled);
    }
  };
  engine->set_cap(Direction::kD2H, 1);  // what is held back would not move for hours
  request.priority = CopyPriority::kBackground;
  ASSERT_TRUE(engine->submit(request, std::array{down(0, 2)}).ok());
  ASSERT_TRUE(engine->submit(request, std::array{down(4, 2)}).ok());
  EXPECT_EQ(engine->held_back(Direction::kD2H), 3 * kBlock);
  request.priority = CopyPriority::kUrgent;
  ASSERT_TRUE(engine->submit(request, std::array{down(8, 2)}).ok());
  gate.open();
  engine.reset();
  EXPECT_EQ(arrived, 1);
  EXPECT_EQ(cancelled, (std::vector{Errc::kCancelled, Errc::kCancelled}));
  EXPECT_TRUE(all(host(0), 3)) << "what was in flight was waited for";
  EXPECT_TRUE(all(host(8), 3, 2));
  EXPECT_TRUE(all(host(1), 0) && all(host(4), 0, 2)) << "what was cancelled never moves";
}

TEST(CopyReasons, EachHasItsOwnName) {
  std::set<std::string> names;
  for (int reason = 0; reason < kCopyReasonCount; ++reason)
    names.insert(name_of(static_cast<CopyReason>(reason)));
  EXPECT_EQ(names, (std::set<std::string>{"spill", "restore", "offload", "fetch", "expert", "optimizer"}));
}

}  // namespace
}  // namespace terrace
