#include "runtime/copy_cap.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Nanoseconds kStart = seconds(1000);

TEST(CopyCap, WithoutARateNothingWaits) {
  CopyCap cap;
  for (int i = 0; i < 10; ++i) cap.spend(1_GiB, kStart);
  EXPECT_TRUE(cap.open(kStart));
  EXPECT_EQ(cap.opens_at(kStart), kStart);
}

TEST(CopyCap, APieceIsPaidForBeforeTheNextStarts) {
  CopyCap cap;
  cap.set_rate(1e6, kStart);
  EXPECT_TRUE(cap.open(kStart)) << "the first need not wait";
  cap.spend(Bytes(1'000'000), kStart);
  EXPECT_FALSE(cap.open(kStart));
  EXPECT_EQ(cap.opens_at(kStart), kStart + seconds(1));
  EXPECT_FALSE(cap.open(kStart + milliseconds(999)));
  EXPECT_TRUE(cap.open(kStart + seconds(1)));
}

TEST(CopyCap, OverALongTimeTheRateHolds) {
  CopyCap cap;
  cap.set_rate(1e9, kStart);
  Bytes moved;
  for (Nanoseconds now = kStart; now < kStart + seconds(2); now = cap.opens_at(now) + milliseconds(1)) {
    ASSERT_TRUE(cap.open(now)) << "when it said";
    cap.spend(32_MiB, now);
    moved += 32_MiB;
  }
  EXPECT_LE(moved, Bytes(2'000'000'000) + 32_MiB);
  EXPECT_GE(moved, Bytes(1'900'000'000)) << "a thread that wakes a little late loses nothing";
}

TEST(CopyCap, AnIdleWhileIsNotSavedUp) {
  CopyCap cap;
  cap.set_rate(1e6, kStart);
  cap.spend(Bytes(1'000'000), kStart);
  const Nanoseconds later = kStart + seconds(3600);
  cap.spend(Bytes(1'000'000), later);
  EXPECT_EQ(cap.opens_at(later), later + seconds(1) - CopyCap::kBurst);
}

TEST(CopyCap, ANewRateKeepsTheDebtAndNoRateForgivesIt) {
  CopyCap cap;
  cap.set_rate(1e6, kStart);
  cap.spend(Bytes(1'000'000), kStart);
  cap.set_rate(10e6, kStart);
  EXPECT_EQ(cap.opens_at(kStart), kStart + milliseconds(100));
  cap.set_rate(0, kStart);
  EXPECT_TRUE(cap.open(kStart));
  cap.set_rate(1e6, kStart);
  EXPECT_TRUE(cap.open(kStart));
}

TEST(CopyCap, WhatMayNotWaitOwesALittleAtMost) {
  CopyCap cap;
  Nanoseconds now = seconds(1);
  cap.set_rate(1e6, now);
  constexpr Nanoseconds kLongest = std::chrono::milliseconds(50);
  for (int i = 0; i < 100; ++i) cap.spend_within(Bytes(1000000), kLongest, now);
  EXPECT_EQ(cap.opens_at(now), now + kLongest);
  cap.spend(Bytes(1000000), now);
  EXPECT_EQ(cap.opens_at(now), now + kLongest + seconds(1));
  cap.spend_within(Bytes(1000), kLongest, now);
  EXPECT_EQ(cap.opens_at(now), now + kLongest + seconds(1)) << "a larger debt stays";
}

TEST(CopyCap, TheSmallestRateDoesNotOverflowTheClock) {
  CopyCap cap;
  cap.set_rate(1e-9, kStart);
  cap.spend(1_GiB, kStart);
  EXPECT_GT(cap.opens_at(kStart), kStart);
}

}  // namespace
}  // namespace terrace
