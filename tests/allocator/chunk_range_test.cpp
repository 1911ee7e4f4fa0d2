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

  ChunkRange make() { return ChunkRange(*device_, reservation_, {0, 16_MiB}, {64_KiB, 1_MiB}); }
  void map(ChunkRange& range, Bytes at, Bytes size = 1_MiB) {
    ASSERT_TRUE(
        range.map_chunks(at.count(), std::vector<PhysicalPiece>{{*device_->create_physical(size), size}}));
  }
  // Takes the last wholly free chunk out, as a growth elsewhere would.
  std::uint64_t drop(ChunkRange& range) {
    const std::uint64_t chunk = range.free_chunk(nullptr, kAny).value();
    device_->destroy_physical(range.unmap_chunk(chunk)->physical);
    return chunk;
  }

  std::unique_ptr<Device> device_;
  Reservation reservation_;
};

TEST_F(ChunkRangeTest, GrowthExtendsTheFreeEndInsteadOfStartingAfresh) {
  ChunkRange range = make();
  map(range, 0_B);
  range.free().take(0, 512_KiB);
  const auto growth = range.plan_growth(1_MiB);
  ASSERT_TRUE(growth.has_value());
  EXPECT_EQ(growth->first, (1_MiB).count());
  EXPECT_EQ(growth->missing, 512_KiB) << "half of it is there already";
  EXPECT_EQ(growth->offset, (512_KiB).count());
}

TEST_F(ChunkRangeTest, OnlyWhatIsMissingIsMapped) {
  ChunkRange range = make();
  map(range, 0_B, 192_KiB);
  range.free().take(0, 190_KiB);
  const auto growth = range.plan_growth(100_KiB);
  ASSERT_TRUE(growth.has_value());
  EXPECT_EQ(growth->first, (192_KiB).count());
  EXPECT_EQ(growth->missing, 128_KiB) << "98 KiB, in units of the device";
}

TEST_F(ChunkRangeTest, AGrowthHasRoomForAChunkOfAnySizeAtItsEnd) {
  ChunkRange range = make();
  map(range, 0_B);
  map(range, 1_MiB + 512_KiB);
  range.free().take(0, 1_MiB);
  const auto growth = range.plan_growth(128_KiB + (1_MiB));
  ASSERT_TRUE(growth.has_value());
  EXPECT_EQ(growth->first, (2_MiB + 512_KiB).count()) << "512 KiB between two chunks are too little";
  EXPECT_EQ(growth->room, growth->missing + 1_MiB - 64_KiB);
}

TEST_F(ChunkRangeTest, FreeMemoryThatEndsInsideAChunkIsNoEndToExtend) {
  ChunkRange range = make();
  map(range, 0_B);
  range.free().take((512_KiB).count(), 512_KiB);
  const auto growth = range.plan_growth(1_MiB);
  ASSERT_TRUE(growth.has_value());
  EXPECT_EQ(growth->offset, (1_MiB).count());
  EXPECT_EQ(growth->missing, 1_MiB);
}

TEST_F(ChunkRangeTest, WhatIsLargerThanTheRangeHasNoPlace) {
  ChunkRange range = make();
  EXPECT_TRUE(range.plan_growth(15_MiB).has_value());
  EXPECT_FALSE(range.plan_growth(17_MiB).has_value());
}

TEST_F(ChunkRangeTest, AChunkMovesWithItsBytesBehindIt) {
  ChunkRange range = make();
  map(range, 0_B);
  map(range, 1_MiB, 128_KiB);
  EXPECT_EQ(*range.free_chunk(nullptr, kAny), (1_MiB).count());
  std::memset(range.address_of((1_MiB).count()), 0x5A, 16);
  const auto chunk = range.unmap_chunk((1_MiB).count());
  ASSERT_TRUE(chunk);
  EXPECT_EQ(chunk->size, 128_KiB);
  ASSERT_TRUE(range.map_chunks((5_MiB).count(), std::vector{*chunk}));
  EXPECT_EQ(std::to_integer<int>(*range.address_of((5_MiB).count())), 0x5A);
  EXPECT_EQ(range.free().total(), 1_MiB + 128_KiB);
}

TEST_F(ChunkRangeTest, OnlyFreeChunksThatAreWantedAreGiven) {
  ChunkRange range = make();
  for (const Bytes at : {0_MiB, 2_MiB, 3_MiB}) map(range, at);
  EXPECT_EQ(range.free_chunk_bytes(nullptr), 3_MiB);
  const auto in_the_first = [](const Extent& extent) { return extent.offset == 0; };
  EXPECT_EQ(*range.free_chunk(nullptr, in_the_first), 0U);
  range.free().take((3_MiB).count(), 512_KiB);
  EXPECT_EQ(range.free_chunk_bytes(nullptr), 2_MiB) << "half of the last is in use";
  EXPECT_EQ(*range.free_chunk(nullptr, kAny), (2_MiB).count());
}

TEST_F(ChunkRangeTest, OfChunksOfManySizesThoseWhollyFreeAreGiven) {
  ChunkRange range = make();
  Bytes at;
  for (const Bytes size : {256_KiB, 64_KiB, 1_MiB, 128_KiB}) {
    map(range, at, size);
    at += size;
  }
  range.free().take((192_KiB).count(), 64_KiB);      // the end of the first
  range.free().take((at - 64_KiB).count(), 64_KiB);  // and of the last
  EXPECT_EQ(range.free_chunk_bytes(nullptr), 64_KiB + 1_MiB);
  EXPECT_EQ(drop(range), (256_KiB + 64_KiB).count());
  EXPECT_EQ(drop(range), (256_KiB).count());
  EXPECT_FALSE(range.free_chunk(nullptr, kAny).has_value());
  EXPECT_EQ(range.free().total(), 192_KiB + 64_KiB);
}

TEST_F(ChunkRangeTest, AGrowthsOwnExtentIsNotReclaimed) {
  ChunkRange range = make();
  map(range, 0_B);
  const auto growth = range.plan_growth(2_MiB);
  ASSERT_TRUE(growth.has_value());
  EXPECT_FALSE(range.free_chunk(&*growth, kAny).has_value());
  EXPECT_EQ(range.free_chunk_bytes(&*growth), 0_B);
  EXPECT_TRUE(range.free_chunk(nullptr, kAny).has_value());
}

TEST_F(ChunkRangeTest, ARefusedMappingChangesNothing) {
  ChunkRange range = make();
  const std::vector<PhysicalPiece> chunks{{*device_->create_physical(1_MiB), 1_MiB},
                                          {Physical{~0ULL}, 64_KiB}};
  EXPECT_FALSE(range.map_chunks(0, chunks));
  EXPECT_TRUE(range.chunks().empty());
  EXPECT_EQ(range.free().total(), 0_B);
  device_->destroy_physical(chunks[0].physical);
}

}  // namespace
}  // namespace terrace
