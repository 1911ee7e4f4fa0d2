#include "allocator/block_table.hpp"

#include <gtest/gtest.h>

#include <array>

namespace terrace {
namespace {

TEST(BlockTable, FindsABlockFromAnyAddressInside) {
  std::array<std::byte, 4096> memory;
  BlockTable table;
  table.insert({memory.data() + 512, 700_B, Pool::kWeights}, 1024_B);
  EXPECT_FALSE(table.find(memory.data() + 511).has_value());
  EXPECT_EQ(table.find(memory.data() + 512)->address, memory.data() + 512);
  EXPECT_EQ(table.find(memory.data() + 1535)->pool, Pool::kWeights);
  EXPECT_FALSE(table.find(memory.data() + 1536).has_value());
  EXPECT_EQ(table.remove(memory.data() + 512), 1024_B);
  EXPECT_FALSE(table.find(memory.data() + 600).has_value());
}

TEST(BlockTableDeath, OnlyALiveBlocksFirstAddressIsRemoved) {
  std::array<std::byte, 1024> memory;
  BlockTable table;
  table.insert({memory.data(), 512_B, Pool::kScratch}, 512_B);
  EXPECT_DEATH(table.remove(memory.data() + 1), "only a live block is freed");
}

TEST(PoolUsage, KeepsPeaksByPoolAndAWatermarkOfItsOwn) {
  PoolUsage usage;
  usage.add(Pool::kActivation, 100_B);
  usage.add(Pool::kScratch, 50_B);
  usage.remove(Pool::kScratch, 50_B);
  EXPECT_EQ(usage.live, 100_B);
  EXPECT_EQ(usage.live_peak, 150_B);
  EXPECT_EQ(usage.restart_watermark(), 150_B);
  usage.add(Pool::kScratch, 10_B);
  EXPECT_EQ(usage.restart_watermark(), 110_B);
  EXPECT_EQ(usage.live_peak, 150_B);
  EXPECT_EQ(usage.peak_by_pool[static_cast<std::size_t>(Pool::kScratch)], 50_B);
}

}  // namespace
}  // namespace terrace
