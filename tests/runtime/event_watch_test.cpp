#include "runtime/event_watch.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>

#include "runtime/emulated/emulated_device.hpp"

namespace terrace {
namespace {

class EventWatchTest : public testing::Test {
 protected:
  void SetUp() override {
    device_ = open_device("emulated", {.capacity = 64_MiB}).value();
    stream_ = *device_->create_stream(StreamPriority::kNormal);
    events_ = std::make_unique<EventPool>(*device_);
  }
  void TearDown() override {
    events_.reset();
    device_->destroy_stream(stream_);
  }
  EventPool::Held recorded() {
    EventPool::Held event = events_->take().value();
    EXPECT_TRUE(device_->record(stream_, *event).ok());
    return event;
  }

  std::unique_ptr<Device> device_;
  Stream stream_;
  std::unique_ptr<EventPool> events_;
};

TEST_F(EventWatchTest, RingsOnceForEachEventAndNotBeforeItHasCompleted) {
  std::promise<void> open;
  ASSERT_TRUE(device_->launch_host(stream_, [gate = open.get_future().share()] { gate.wait(); }).ok());
  std::atomic<int> rings{0};
  std::atomic<int> early{0};
  std::atomic<bool> opened{false};
  EventWatch watch(*device_, [&] {
    if (!opened) ++early;
    ++rings;
    rings.notify_all();
  });
  for (int i = 0; i < 3; ++i) watch.add(recorded());
  opened = true;
  open.set_value();
  for (int seen = rings; seen < 3; seen = rings) rings.wait(seen);
  EXPECT_EQ(early, 0);
  EXPECT_EQ(rings, 3);
}

TEST_F(EventWatchTest, RingsForAnEventThatFailed) {
  ASSERT_TRUE(device_->launch_host(stream_, [] { throw std::runtime_error("bad kernel"); }).ok());
  std::promise<void> rung;
  EventWatch watch(*device_, [&] { rung.set_value(); });
  watch.add(recorded());
  rung.get_future().wait();
  (void)device_->synchronize(stream_);
}

TEST_F(EventWatchTest, ItsEndLetsGoOfWhatItHasNotComeTo) {
  std::promise<void> open;
  ASSERT_TRUE(device_->launch_host(stream_, [gate = open.get_future().share()] { gate.wait(); }).ok());
  {
    EventWatch watch(*device_, [] {});
    for (int i = 0; i < 4; ++i) watch.add(recorded());
    open.set_value();
  }
  EXPECT_TRUE(device_->synchronize(stream_).ok());
  events_.reset();  // aborts where an event is still held
}

}  // namespace
}  // namespace terrace
