#include "allocator/stream_order.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <semaphore>
#include <thread>
#include <vector>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"

namespace terrace {
namespace {

class StreamOrderTest : public testing::Test {
 protected:
  StreamOrderTest() : device_(std::move(EmulatedDevice::create({.capacity = 1_MiB})).value()) {
    for (Stream& stream : streams_) stream = *device_->create_stream(StreamPriority::kNormal);
    order_ = std::make_unique<StreamOrder>(*device_);
    for (std::size_t i = 0; i < 3; ++i) index_[i] = *order_->index_of(streams_[i]);
  }
  ~StreamOrderTest() override {
    order_.reset();
    EXPECT_EQ(device_->live_events(), 0);
    for (const Stream stream : streams_) {
      if (device_->alive(stream)) device_->destroy_stream(stream);
    }
  }
  // Work on the stream stands still until open().
  void close(std::size_t stream) {
    ASSERT_TRUE(device_->launch_host(streams_[stream], [this] { gate_.acquire(); }));
  }
  void open() {
    for (int i = 0; i < 100; ++i) std::this_thread::yield();  // work that is free to run does so meanwhile
    opened_ = true;
    gate_.release();
    for (const Stream stream : held_) EXPECT_TRUE(device_->synchronize(stream));
    EXPECT_EQ(ran_early_, 0) << "work ran ahead of what it waits for";
  }
  // Queues work that must not run before open().
  void expect_held_back(std::size_t stream) {
    held_.push_back(streams_[stream]);
    EXPECT_TRUE(device_->launch_host(streams_[stream], [this] {
      if (!opened_) ++ran_early_;
    }));
  }
  // Work queued now runs though the gate is shut; where it does not, this hangs until the test's time-out.
  void expect_free_to_run(std::size_t stream) { EXPECT_TRUE(device_->synchronize(streams_[stream])); }

  std::unique_ptr<EmulatedDevice> device_;
  std::array<Stream, 3> streams_;
  std::array<StreamOrder::Index, 3> index_{};
  std::unique_ptr<StreamOrder> order_;
  std::counting_semaphore<> gate_{0};
  std::atomic<bool> opened_{false};
  std::atomic<int> ran_early_{0};
  std::vector<Stream> held_;
};

TEST_F(StreamOrderTest, ReuseElsewhereWaitsForTheFree) {
  close(0);
  const Pending pending = order_->freed_on(index_[0]);
  EXPECT_TRUE(order_->ready_for(index_[0], pending)) << "the same stream needs no order";
  EXPECT_FALSE(order_->ready_for(index_[1], pending));
  ASSERT_TRUE(order_->order_behind(index_[1], pending));
  expect_held_back(1);
  EXPECT_TRUE(order_->ready_for(index_[1], pending)) << "it waits already";
  EXPECT_FALSE(order_->ready_for(index_[2], pending));
  open();
}

TEST_F(StreamOrderTest, WhatWasQueuedBehindAnEarlierFenceIsNotWaitedFor) {
  const Pending first = order_->freed_on(index_[0]);
  const Pending second = order_->freed_on(index_[0]);
  ASSERT_TRUE(order_->order_behind(index_[1], first));  // records a fence behind both frees
  close(0);                                             // and then the stream gets long work
  ASSERT_TRUE(order_->order_behind(index_[2], second));
  expect_free_to_run(2);
  const Pending third = order_->freed_on(index_[0]);
  ASSERT_TRUE(order_->order_behind(index_[2], third));
  expect_held_back(2);  // what was freed later waits for a later fence
  open();
}

TEST_F(StreamOrderTest, FencesAreFewAndTheOldestMakesWay) {
  close(0);
  std::vector<Pending> frees;
  for (int i = 0; i < 20; ++i) {
    frees.push_back(order_->freed_on(index_[0]));
    ASSERT_TRUE(order_->order_behind(index_[1], frees.back()));
  }
  EXPECT_LE(device_->live_events(), 4);
  ASSERT_TRUE(order_->order_behind(index_[2], frees.front()));
  expect_held_back(2);  // a lost fence is stood in for by a later one
  open();
  ASSERT_TRUE(order_->finish(frees.back()));
  EXPECT_TRUE(order_->ready_for(index_[1], frees.back()));
}

TEST_F(StreamOrderTest, AStreamThatEndedPendsOnNothing) {
  const Pending before = order_->freed_on(index_[0]);
  device_->destroy_stream(streams_[0]);
  EXPECT_EQ(order_->freed_on(index_[0]).streams, 0U);
  EXPECT_TRUE(order_->order_behind(index_[1], before));
  EXPECT_TRUE(order_->finish(before));
  EXPECT_EQ(device_->live_events(), 0) << "nothing was recorded";
  EXPECT_EQ(order_->index_of(streams_[0]).error().code, Errc::kInvalidArgument);
}

TEST_F(StreamOrderTest, ABitGoesToAnotherStreamWhenItsFreesAreOver) {
  std::vector<Stream> more;
  close(0);
  const Pending pending = order_->freed_on(index_[0]);
  while (order_->index_of(streams_[0])) {
    more.push_back(*device_->create_stream(StreamPriority::kNormal));
    if (more.size() + 3 > StreamOrder::kMostStreams) break;
    ASSERT_TRUE(order_->index_of(more.back()));
  }
  // Quiet streams lend their bits; the one with work pending keeps its own.
  const auto taken = order_->index_of(more.back());
  ASSERT_TRUE(taken) << taken.error().text;
  EXPECT_NE(*taken, index_[0]);
  EXPECT_FALSE(order_->ready_for(*taken, pending)) << "the new owner of a bit has waited for nothing yet";
  open();
  for (const Stream stream : more) device_->destroy_stream(stream);
}

TEST_F(StreamOrderTest, RefusalsOfTheDeviceAreErrorsThatKeepTheOrder) {
  close(0);
  const Pending pending = order_->freed_on(index_[0]);
  for (const FaultPoint point :
       {FaultPoint::kDeviceCreateEvent, FaultPoint::kDeviceRecord, FaultPoint::kDeviceWait}) {
    ScopedFaults faults(fail_call(point, 1));
    EXPECT_FALSE(order_->order_behind(index_[1], pending)) << name_of(point);
    EXPECT_FALSE(order_->ready_for(index_[1], pending));
  }
  ASSERT_TRUE(order_->order_behind(index_[1], pending));
  expect_held_back(1);
  open();
}

}  // namespace
}  // namespace terrace
