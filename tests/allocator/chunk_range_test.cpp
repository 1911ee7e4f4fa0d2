#include "allocator/chunk_range.hpp"

#include <gtest/gtest.h>

#include <cstring>

namespace terrace {
namespace {

class ChunkRangeTest : public testing::Test {
 protected:
  ChunkRangeTest() : device_(std::move(open_emulated_device({.capacity = 8_MiB})).value()) {}

  ChunkRange make() { return std::move(ChunkRange::create(*device_, 16_MiB, 1_MiB)).value(); }
  void map(ChunkRange& range, std::size_t index) {
    ASSERT_TRUE(range.map_chunk(index, *device_->create_physical(1_MiB)));
  }

  std::unique_ptr<Device> device_;
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
  EXPECT_EQ(*range.free_chunk(nullptr), 1U);
  std::memset(range.address_of((1_MiB).count()), 0x5A, 16);
  auto physical = range.unmap_chunk(1);
  ASSERT_TRUE(physical);
  ASSERT_TRUE(range.map_chunk(5, *physical));
  EXPECT_EQ(std::to_integer<int>(*range.address_of((5_MiB).count())), 0x5A);
  EXPECT_EQ(range.free().total(), 2_MiB);
}

TEST_F(ChunkRangeTest, AGrowthsOwnExtentIsNotReclaimed) {
  ChunkRange range = make();
  map(range, 0);
  const auto growth = range.plan_growth(2_MiB);
  ASSERT_TRUE(growth.has_value());
  EXPECT_FALSE(range.free_chunk(&*growth).has_value());
  EXPECT_TRUE(range.free_chunk(nullptr).has_value());
}

}  // namespace
}  // namespace terrace
