#include "runtime/copy_engine.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

constexpr Bytes kBlock = 256_KiB;

class CopyEngineTest : public testing::Test {
 protected:
  void SetUp() override {
    metrics().clear();
    device_ = EmulatedDevice::create({.capacity = 16_MiB}).value();
    hbm_ = device_->reserve(4 * kBlock).value();
    physical_ = device_->create_physical(4 * kBlock).value();
    ASSERT_TRUE(device_->map(hbm_, physical_, 4 * kBlock).ok());
    host_.resize((4 * kBlock).count());
  }
  void TearDown() override {
    ASSERT_TRUE(device_->unmap(hbm_, 4 * kBlock).ok());
    device_->destroy_physical(physical_);
    device_->release(hbm_, 4 * kBlock);
    EXPECT_EQ(device_->live_streams(), 0);
    EXPECT_EQ(device_->live_events(), 0);
  }
  // What the metrics say was sent since the test began.
  [[nodiscard]] static Bytes moved(Direction direction, CopyReason reason) {
    return Bytes(metrics().value<Metric::kTransferBytes>(direction, reason));
  }
  [[nodiscard]] Address hbm(std::uint64_t block) const { return hbm_ + block * kBlock.count(); }
  [[nodiscard]] Address host(std::uint64_t block) { return host_.data() + block * kBlock.count(); }

  std::unique_ptr<EmulatedDevice> device_;
  Address hbm_ = nullptr;
  Physical physical_;
  std::vector<std::byte> host_;
};

TEST_F(CopyEngineTest, ABatchIsDoneWhenItsTicketIs) {
  auto engine = CopyEngine::create(*device_).value();
  std::memset(hbm(0), 1, kBlock.count());
  std::memset(hbm(1), 2, kBlock.count());
  const std::array batch = {Transfer{.to = host(0), .from = hbm(1), .size = kBlock},
                            Transfer{.to = host(1), .from = hbm(0), .size = kBlock}};
  auto ticket = engine->submit(Direction::kD2H, Event{}, batch, CopyReason::kSpill);
  ASSERT_TRUE(ticket.ok());
  EXPECT_TRUE(ticket->valid());
  EXPECT_EQ(ticket->bytes(), 2 * kBlock);
  ASSERT_TRUE(ticket->synchronize().ok());
  EXPECT_TRUE(ticket->done());
  EXPECT_EQ(host(0)[7], std::byte{2});
  EXPECT_EQ(host(1)[7], std::byte{1});
  EXPECT_GT(*engine->seconds(*ticket), 0);
  { const auto gone = std::move(*ticket); }
  EXPECT_GT(metrics().value<Metric::kTransferSeconds>(Direction::kD2H, CopyReason::kSpill), 0U);
  EXPECT_EQ(moved(Direction::kD2H, CopyReason::kSpill), 2 * kBlock);
  EXPECT_EQ(moved(Direction::kD2H, CopyReason::kRestore), 0_B);
  EXPECT_EQ(moved(Direction::kH2D, CopyReason::kSpill), 0_B);
}

TEST_F(CopyEngineTest, StartsOnlyAfterTheEventAndOthersWaitForTheTicket) {
  auto engine = CopyEngine::create(*device_).value();
  const Stream compute = *device_->create_stream(StreamPriority::kNormal);
  const Event produced = *device_->create_event();
  std::promise<void> opened;
  ASSERT_TRUE(device_->launch_host(compute, [gate = opened.get_future().share()] { gate.wait(); }).ok());
  ASSERT_TRUE(device_->fill(compute, hbm(0), 9, kBlock).ok());
  ASSERT_TRUE(device_->record(compute, produced).ok());
  const std::array spill = {Transfer{.to = host(0), .from = hbm(0), .size = kBlock}};
  const auto spilled = engine->submit(Direction::kD2H, produced, spill, CopyReason::kSpill);
  ASSERT_TRUE(spilled.ok());
  EXPECT_FALSE(spilled->done()) << "the producer is held";
  const std::array restore = {Transfer{.to = hbm(1), .from = host(0), .size = kBlock}};
  const auto restored = engine->submit(Direction::kH2D, spilled->finished(), restore, CopyReason::kRestore);
  ASSERT_TRUE(restored.ok());
  std::byte seen{0};
  ASSERT_TRUE(device_->wait(compute, restored->finished()).ok());
  ASSERT_TRUE(device_->launch_host(compute, [&] { seen = hbm(1)[100]; }).ok());
  opened.set_value();
  ASSERT_TRUE(device_->synchronize(compute).ok());
  EXPECT_EQ(seen, std::byte{9});
  device_->destroy_event(produced);
  device_->destroy_stream(compute);
}

TEST_F(CopyEngineTest, BothDirectionsRunAtOnce) {
  auto engine = CopyEngine::create(*device_).value();
  EXPECT_NE(engine->stream(Direction::kH2D), engine->stream(Direction::kD2H));
  const std::array up = {Transfer{.to = hbm(0), .from = host(0), .size = kBlock}};
  const std::array down = {Transfer{.to = host(1), .from = hbm(1), .size = kBlock}};
  std::promise<void> opened;
  ASSERT_TRUE(device_
                  ->launch_host(engine->stream(Direction::kH2D),
                                [gate = opened.get_future().share()] { gate.wait(); })
                  .ok());
  const auto held = engine->submit(Direction::kH2D, Event{}, up, CopyReason::kRestore);
  const auto free = engine->submit(Direction::kD2H, Event{}, down, CopyReason::kSpill);
  ASSERT_TRUE(held.ok() && free.ok());
  EXPECT_TRUE(free->synchronize().ok());
  EXPECT_FALSE(held->done());
  opened.set_value();
  EXPECT_TRUE(held->synchronize().ok());
}

TEST_F(CopyEngineTest, EventsAreUsedAgain) {
  auto engine = CopyEngine::create(*device_).value();
  const std::array batch = {Transfer{.to = hbm(0), .from = host(0), .size = 4_KiB}};
  for (int i = 0; i < 50; ++i) {
    auto ticket = engine->submit(Direction::kH2D, Event{}, batch, CopyReason::kFetch);
    ASSERT_TRUE(ticket.ok());
    CopyEngine::Ticket kept = std::move(ticket).value();
    kept = CopyEngine::Ticket();
    EXPECT_FALSE(kept.valid());
  }
  EXPECT_EQ(device_->live_events(), 2);
}

TEST_F(CopyEngineTest, RefusesWhatDoesNotCrossTheLink) {
  auto engine = CopyEngine::create(*device_).value();
  const auto refused = engine->submit(Direction::kD2D, Event{}, {}, CopyReason::kFetch);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
  const auto empty = engine->submit(Direction::kH2D, Event{}, {}, CopyReason::kFetch);
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty->synchronize().ok());
}

TEST_F(CopyEngineTest, AFailedBatchMovesNothingLater) {
  auto engine = CopyEngine::create(*device_).value();
  std::memset(host(0), 1, kBlock.count());
  const std::array batch = {Transfer{.to = hbm(0), .from = host(0), .size = kBlock},
                            Transfer{.to = hbm(1), .from = host(0), .size = kBlock}};
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceCopy, 2));
    const auto failed = engine->submit(Direction::kH2D, Event{}, batch, CopyReason::kRestore);
    ASSERT_FALSE(failed.ok());
  }
  // The first transfer had been queued: it has ended, so what is written now stays.
  std::memset(hbm(0), 7, kBlock.count());
  const auto other = engine->submit(Direction::kH2D, Event{}, {}, CopyReason::kRestore);
  ASSERT_TRUE(other.ok());
  ASSERT_TRUE(other->synchronize().ok());
  EXPECT_EQ(hbm(0)[kBlock.count() - 1], std::byte{7});
  EXPECT_EQ(moved(Direction::kH2D, CopyReason::kRestore), 0_B);
}

TEST_F(CopyEngineTest, ManyThreadsSubmit) {
  auto engine = CopyEngine::create(*device_).value();
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::memset(host(t), static_cast<int>(t + 1), kBlock.count());
        const std::array up = {Transfer{.to = hbm(t), .from = host(t), .size = kBlock}};
        const std::array down = {Transfer{.to = host(t), .from = hbm(t), .size = kBlock}};
        for (int i = 0; i < 10; ++i) {
          const auto sent = engine->submit(Direction::kH2D, Event{}, up, CopyReason::kRestore);
          ASSERT_TRUE(sent.ok());
          const auto back = engine->submit(Direction::kD2H, sent->finished(), down, CopyReason::kSpill);
          ASSERT_TRUE(back.ok());
          ASSERT_TRUE(back->synchronize().ok());
          EXPECT_EQ(host(t)[0], static_cast<std::byte>(t + 1));
        }
      });
    }
  }
  EXPECT_EQ(moved(Direction::kH2D, CopyReason::kRestore), 40 * kBlock);
}

TEST(CopyReasons, EachHasItsOwnName) {
  std::set<std::string> names;
  for (int reason = 0; reason < kCopyReasonCount; ++reason)
    names.insert(name_of(static_cast<CopyReason>(reason)));
  EXPECT_EQ(names, (std::set<std::string>{"spill", "restore", "offload", "fetch"}));
}

}  // namespace
}  // namespace terrace
