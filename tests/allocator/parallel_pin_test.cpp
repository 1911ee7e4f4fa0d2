#include "allocator/parallel_pin.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "runtime/emulated/emulated_device.hpp"
#include "runtime/fault.hpp"
#include "runtime/pin_step.hpp"

namespace terrace {
namespace {

using testing::HasSubstr;

constexpr Bytes kRange = 2 * kPinStep + 1_MiB + 4_KiB;  // three pieces, the last one short
constexpr std::uint64_t kStripesOfAPiece = 16;

class ParallelPinTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::uint64_t padded = kRange.count() + kPinStep.count();
    space_ =
        mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(space_, MAP_FAILED);
    (void)madvise(space_, padded, MADV_HUGEPAGE);
    const auto start = reinterpret_cast<std::uintptr_t>(space_);
    base_ = reinterpret_cast<Address>(round_up(Bytes(start), kPinStep).count());
    device_ = std::move(EmulatedDevice::create({.capacity = 1_MiB})).value();
  }
  void TearDown() override { munmap(space_, kRange.count() + kPinStep.count()); }
  [[nodiscard]] bool every_page_is_present() const {
    std::vector<unsigned char> present(kRange / 4_KiB);
    return mincore(base_, kRange.count(), present.data()) == 0 &&
           std::all_of(present.begin(), present.end(), [](unsigned char page) { return (page & 1) != 0; });
  }
  static PinPlan plan(int threads) { return {.cpus = usable_cpus(), .touching = threads, .pinning = 2}; }

  void* space_ = nullptr;
  Address base_ = nullptr;
  std::unique_ptr<EmulatedDevice> device_;
};

TEST_F(ParallelPinTest, EveryPageIsPresentAndPinned) {
  EXPECT_FALSE(every_page_is_present());
  for (const int threads : {3, 1}) {
    ASSERT_TRUE(touch_and_pin(*device_, base_, kRange, plan(threads)).ok());
    EXPECT_TRUE(every_page_is_present());
    EXPECT_EQ(device_->pinned_bytes(), kRange);
    unpin_pieces(*device_, base_, kRange);
    EXPECT_EQ(device_->pinned_bytes(), 0_B);
  }
}

// One thread makes its calls in a known order: a piece is pinned before the next one is touched.
TEST_F(ParallelPinTest, PinningDoesNotWaitForAllToBeTouched) {
  const auto failed_call = [&](std::uint64_t nth) {
    ScopedFaults faults(fail_call(nth));
    const Status status = touch_and_pin(*device_, base_, kRange, plan(1));
    return status.ok() ? std::string("none") : status.error().text;
  };
  EXPECT_THAT(failed_call(kStripesOfAPiece), HasSubstr("first touch"));
  EXPECT_THAT(failed_call(kStripesOfAPiece + 1), HasSubstr("device.pin"));
  EXPECT_THAT(failed_call(kStripesOfAPiece + 2), HasSubstr("first touch"));
}

TEST_F(ParallelPinTest, WhicheverCallFailsNothingStaysPinned) {
  std::uint64_t nth = 1;
  for (;; ++nth) {
    ScopedFaults faults(fail_call(nth));
    const Status status = touch_and_pin(*device_, base_, kRange, plan(4));
    EXPECT_EQ(status.ok(), !faults.fired());
    if (status.ok()) break;
    EXPECT_EQ(status.error().code, Errc::kOutOfMemory);
    EXPECT_EQ(device_->pinned_bytes(), 0_B) << nth;
  }
  EXPECT_EQ(nth, 2 * kStripesOfAPiece + 1 + 3 + 1) << "every stripe and every piece was made to fail once";
  unpin_pieces(*device_, base_, kRange);
}

TEST(PinPiece, LargePoolsStayFarFromTheDriversLimits) {
  for (const Bytes size : {4_KiB, 1_GiB, 4_GiB, 16_GiB, 512_GiB, 4096_GiB}) {
    const Bytes piece = pin_piece(size);
    EXPECT_EQ(piece.count() % kPinStep.count(), 0U);
    EXPECT_LE(piece, 1_GiB);
    EXPECT_LE(round_up(size, piece) / piece, 4096U);
  }
  EXPECT_LE(1024 * (4_GiB / pin_piece(4_GiB)), 40'000U) << "4 TiB in slabs of 4 GiB";
}

TEST(PinStep, CutsWhereTwoPinnedRangesMayMeet) {
  const auto at = [](Bytes offset) {
    return reinterpret_cast<const std::byte*>((kPinStep * 5 + offset).count());
  };
  EXPECT_EQ(up_to_pin_step(at(0_B), 1_MiB), 1_MiB);
  EXPECT_EQ(up_to_pin_step(at(0_B), 2 * kPinStep), kPinStep);
  EXPECT_EQ(up_to_pin_step(at(4_KiB), kPinStep), kPinStep - 4_KiB);
  EXPECT_EQ(up_to_pin_step(at(kPinStep - 1_B), 7_B), 1_B);
}

}  // namespace
}  // namespace terrace
