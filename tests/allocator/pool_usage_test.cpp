#include "allocator/pool_usage.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

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
}

}  // namespace
}  // namespace terrace
