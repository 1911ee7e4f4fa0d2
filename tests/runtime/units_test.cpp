#include "runtime/units.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace terrace {
namespace {

TEST(Units, RoundToGranularity) {
  EXPECT_EQ(round_up(1_B, 64_KiB), 64_KiB);
  EXPECT_EQ(round_up(64_KiB, 64_KiB), 64_KiB);
  EXPECT_EQ(round_up(0_B, 64_KiB), 0_B);
  EXPECT_EQ(round_down(65_KiB, 64_KiB), 64_KiB);
  EXPECT_EQ(round_down(63_KiB, 64_KiB), 0_B);
}

TEST(Units, SizesAddScaleAndCompare) {
  EXPECT_EQ(1_KiB + 1_KiB, 2_KiB);
  EXPECT_EQ(3 * 1_MiB - 1_MiB, 2_MiB);
  EXPECT_EQ(1_GiB / 1_MiB, 1024U);
  EXPECT_EQ(1_GiB / 4, 256_MiB);
  EXPECT_LT(1023_B, 1_KiB);
  EXPECT_EQ(saturating_sub(1_KiB, 2_KiB), 0_B);
  EXPECT_EQ(saturating_sub(2_KiB, 1_KiB), 1_KiB);
}

TEST(Units, SizesAreWrittenForPeople) {
  EXPECT_EQ(format_bytes(0_B), "0 B");
  EXPECT_EQ(format_bytes(17_B), "17 B");
  EXPECT_EQ(format_bytes(1023_B), "1023 B");
  EXPECT_EQ(format_bytes(1_KiB), "1.0 KiB");
  EXPECT_EQ(format_bytes(64_MiB), "64.0 MiB");
  EXPECT_EQ(format_bytes(1536_MiB), "1.5 GiB");
  EXPECT_EQ(format_bytes(1_MiB - 1_B), "1.0 MiB") << "never \"1024.0 KiB\"";
  EXPECT_EQ(format_bytes(Bytes(UINT64_MAX)), "16.0 EiB");
}

TEST(Units, EveryTierAndPoolHasItsOwnName) {
  std::set<std::string> names;
  for (int tier = 0; tier < kTierCount; ++tier) names.insert(name_of(static_cast<TierId>(tier)));
  EXPECT_EQ(names, (std::set<std::string>{"hbm", "peer", "ddr", "nvme"}));
  names.clear();
  for (int pool = 0; pool < kPoolCount; ++pool) names.insert(name_of(static_cast<Pool>(pool)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kPoolCount));
  EXPECT_EQ(names.count("unknown"), 0U);
}

}  // namespace
}  // namespace terrace
