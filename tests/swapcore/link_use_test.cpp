#include "swapcore/link_use.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "runtime/fault.hpp"

namespace terrace {
namespace {

using Moment = LinkUse::Moment;
constexpr double kRate = 1e9;
constexpr auto kIn = static_cast<std::size_t>(Direction::kH2D);
constexpr auto kOut = static_cast<std::size_t>(Direction::kD2H);

class LinkUseTest : public testing::Test {
 protected:
  LinkUseTest()
      : device_(std::move(open_emulated_device({})).value()),
        compute_(*device_->create_stream(StreamPriority::kNormal)),
        clock_(std::move(DeviceClock::create(*device_, compute_)).value()),
        use_(std::make_unique<LinkUse>(*device_, compute_, *clock_)) {}
  ~LinkUseTest() override {
    use_.reset();
    clock_.reset();
    device_->destroy_stream(compute_);
  }
  // Some time passes in the compute stream. Returns when it was done, by the device.
  double work() {
    const Event done = *device_->create_event();
    EXPECT_TRUE(
        device_->launch_host(compute_, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }));
    EXPECT_TRUE(device_->record(compute_, done));
    EXPECT_TRUE(device_->synchronize(compute_));
    const double at = *clock_->at(done);
    device_->destroy_event(done);
    return at;
  }

  std::unique_ptr<Device> device_;
  Stream compute_;
  std::unique_ptr<DeviceClock> clock_;
  std::unique_ptr<LinkUse> use_;
};

TEST_F(LinkUseTest, CountsWhatMovesInsideTheWindowsOfEachDirection) {
  double at = work();
  for (int step = 0; step < 2; ++step) {
    use_->begin();
    use_->moved(Direction::kD2H, 9_MiB, at - 0.002, at - 0.001);  // before the micro-batch
    for (int batch = 0; batch < 2; ++batch) {
      use_->mark(Moment::kBegin);
      const double middle = work();
      use_->moved(Direction::kD2H, 1_MiB, middle, middle + 0.0005);
      (void)work();
      use_->mark(Moment::kHead);
      const double back = work();
      use_->moved(Direction::kH2D, 2_MiB, back, back + 0.0005);
      (void)work();
      use_->mark(Moment::kFirstLayer);
      at = work();
      use_->mark(Moment::kEnd);
    }
    ASSERT_TRUE(device_->synchronize(compute_));
    const auto ways = use_->measure(kRate, 2 * kRate);
    ASSERT_TRUE(ways);
    EXPECT_EQ((*ways)[kOut].moved, 2_MiB);
    EXPECT_EQ((*ways)[kIn].moved, 4_MiB);
    EXPECT_GT((*ways)[kOut].capacity, Bytes(static_cast<std::uint64_t>(2 * 0.004 * 2 * kRate) * 9 / 10));
    EXPECT_GT((*ways)[kIn].capacity, Bytes(static_cast<std::uint64_t>(2 * 0.004 * kRate) * 9 / 10));
  }
}

// A spill that ends behind the head, a restore that ends in the first layer's backward: the window is as long
// as that.
TEST_F(LinkUseTest, AWindowLastsUntilItsLastCopyHasEnded) {
  use_->begin();
  use_->mark(Moment::kBegin);
  const double head = work();
  use_->mark(Moment::kHead);
  use_->moved(Direction::kD2H, 100_MiB, head - 0.001, head + 0.099);
  use_->mark(Moment::kFirstLayer);
  (void)work();
  use_->mark(Moment::kEnd);
  ASSERT_TRUE(device_->synchronize(compute_));
  const auto ways = use_->measure(kRate, kRate);
  ASSERT_TRUE(ways);
  EXPECT_EQ((*ways)[kOut].moved, 100_MiB);
  EXPECT_GT((*ways)[kOut].capacity, Bytes(99'000'000));
}

TEST_F(LinkUseTest, AStepOfAnotherShapeOrWithoutAMarkIsNotMeasured) {
  EXPECT_FALSE(use_->measure(kRate, kRate));
  use_->begin();
  for (const Moment moment : {Moment::kBegin, Moment::kHead, Moment::kEnd}) use_->mark(moment);
  EXPECT_FALSE(use_->measure(kRate, kRate));
  use_->begin();
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceRecord, 2));
    for (const Moment moment : {Moment::kBegin, Moment::kHead, Moment::kFirstLayer, Moment::kEnd})
      use_->mark(moment);
  }
  ASSERT_TRUE(device_->synchronize(compute_));
  EXPECT_FALSE(use_->measure(kRate, kRate));
}

}  // namespace
}  // namespace terrace
