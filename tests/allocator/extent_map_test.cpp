#include "allocator/extent_map.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace terrace {
namespace {

TEST(ExtentMap, JoinsNeighboursAndTheirPendingStreams) {
  ExtentMap map;
  map.insert({0, 100_B, 0b001});
  map.insert({200, 100_B, 0b010});
  EXPECT_EQ(map.by_offset().size(), 2U);
  map.insert({100, 100_B, 0b100});
  ASSERT_EQ(map.by_offset().size(), 1U);
  EXPECT_EQ(map.largest(), 300_B);
  EXPECT_EQ(map.by_offset().at(0).pending, 0b111U);
}

TEST(ExtentMap, BestFitIsTheSmallestThenTheLowest) {
  ExtentMap map;
  map.insert({0, 300_B, 0});
  map.insert({1000, 100_B, 0});
  map.insert({2000, 100_B, 0});
  EXPECT_EQ(map.best_fit(80_B)->offset, 1000U);
  EXPECT_EQ(map.best_fit(101_B)->offset, 0U);
  EXPECT_FALSE(map.best_fit(301_B).has_value());
}

TEST(ExtentMap, TakingFromTheMiddleLeavesBothSides) {
  ExtentMap map;
  map.insert({0, 300_B, 5});
  EXPECT_EQ(map.take(100, 50_B).pending, 5U);
  EXPECT_EQ(map.total(), 250_B);
  EXPECT_EQ(map.ending_at(100)->offset, 0U);
  EXPECT_EQ(map.by_offset().at(150).size, 150_B);
}

// Against a byte map: whatever the order, free bytes are the same and no two extents touch.
TEST(ExtentMap, AgreesWithAByteMap) {
  constexpr std::uint64_t kSize = 512;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    std::vector<bool> free(kSize, false);
    ExtentMap map;
    for (int i = 0; i < 400; ++i) {
      const std::uint64_t at = random() % kSize;
      std::uint64_t length = 1;
      while (at + length < kSize && length < 40 && free[at + length] == free[at]) ++length;
      if (free[at]) {
        map.take(at, Bytes(length));
      } else {
        map.insert({at, Bytes(length), 0});
      }
      for (std::uint64_t b = at; b < at + length; ++b) free[b] = !free[b];
    }
    std::uint64_t last_end = kSize + 1;
    std::vector<bool> seen(kSize, false);
    for (const auto& [offset, extent] : map.by_offset()) {
      EXPECT_NE(offset, last_end) << "neighbours are joined";
      last_end = extent.end();
      for (std::uint64_t b = offset; b < extent.end(); ++b) seen[b] = true;
    }
    EXPECT_EQ(seen, free) << "seed " << seed;
  }
}

TEST(ExtentMapDeath, FreeingTwiceIsCaught) {
  ExtentMap map;
  map.insert({0, 100_B, 0});
  EXPECT_DEATH(map.insert({50, 10_B, 0}), "a range is freed once");
}

}  // namespace
}  // namespace terrace
