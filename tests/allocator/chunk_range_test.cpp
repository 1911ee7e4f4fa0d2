#include "allocator/chunk_range.hpp"

#include <gtest/gtest.h>

#include <cstring>

namespace terrace {
namespace {

constexpr auto kAny = [](const Extent&) { return true; };

class ChunkRangeTest : public testing::Test {
 protected:
  ChunkRangeTest()
      : device_(std::move(open_emulated_device({.capacity = 8_MiB})).value()),
        reservation_(std::move(Reservation::make(*device_, 16_MiB)).value()) {}

  ChunkRange make() { return ChunkRange(*device_, reservation_, {0, 16_MiB, 1_MiB}); }
  void map(ChunkRange& range, std::size_t index) {
    ASSERT_TRUE(range.map_chunks(index, std::vector{*device_->create_physical(1_MiB)}));
  }

  std::unique_ptr<Device> device_;
  Reservation reservation_;
};

TEST_F(ChunkRangeTest, GrowthExtendsTheFreeEndInsteadOfStartingAfresh) {
  ChunkRange range = make();
  map(range, 0);
  range.free().take(0, 512_KiB);
  const auto growth = range.plan_growth(1_MiB);
  ASSERT_TRUE(growth.has_value());
  EXPECT_EQ(growth->first_chunk, 1U);
  EXPECT_EQ(growth->chunks, 1U) << "half a chunk is there already";
  EXPECT_EQ(growth->offset, (512_KiB).count());
}

TEST_F(ChunkRangeTest, WhatIsLargerThanTheRangeHasNoPlace) {
  ChunkRange range = make();
  EXPECT_FALSE(range.plan_growth(17_MiB).has_value());
}

TEST_F(ChunkRangeTest, AChunkMovesWithItsBytesBehindIt) {
  ChunkRange range = make();
  map(range, 0);
  map(range, 1);
  EXPECT_EQ(*range.free_chunk(nullptr, kAny), 1U);
  std::memset(range.address_of((1_MiB).count()), 0x5A, 16);
  auto physical = range.unmap_chunk(1);
  ASSERT_TRUE(physical);
  ASSERT_TRUE(range.map_chunks(5, std::vector{*physical}));
  EXPECT_EQ(std::to_integer<int>(*range.address_of((5_MiB).count())), 0x5A);
  EXPECT_EQ(range.free().total(), 2_MiB);
}

TEST_F(ChunkRangeTest, OnlyFreeChunksThatAreWantedAreGiven) {
  ChunkRange range = make();
  for (const std::size_t index : {0, 2, 3}) map(range, index);
  EXPECT_EQ(range.free_chunks(nullptr), 3U);
  const auto in_the_first = [](const Extent& extent) { return extent.offset == 0; };
  EXPECT_EQ(*range.free_chunk(nullptr, in_the_first), 0U);
  range.free().take((3_MiB).count(), 512_KiB);
  EXPECT_EQ(range.free_chunks(nullptr), 2U) << "half of the last is in use";
  EXPECT_EQ(*range.free_chunk(nullptr, kAny), 2U);
}

TEST_F(ChunkRangeTest, AGrowthsOwnExtentIsNotReclaimed) {
  ChunkRange range = make();
  map(range, 0);
  const auto growth = range.plan_growth(2_MiB);
  ASSERT_TRUE(growth.has_value());
  EXPECT_FALSE(range.free_chunk(&*growth, kAny).has_value());
  EXPECT_TRUE(range.free_chunk(nullptr, kAny).has_value());
}

}  // namespace
}  // namespace terrace
