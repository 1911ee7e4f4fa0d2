#include "daemon/fair_shares.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "tests/daemon/fair_reference.hpp"

namespace terrace {
namespace {

using testing::ElementsAre;

TEST(FairShares, WhatOneLeavesGoesToTheOthers) {
  const std::vector<Claim> even = {{100_B, 0_B, 1}, {100_B, 0_B, 1}};
  EXPECT_THAT(fair_shares(100_B, even), ElementsAre(50_B, 50_B));
  const std::vector<Claim> modest = {{10_B, 0_B, 1}, {100_B, 0_B, 1}, {100_B, 0_B, 1}};
  EXPECT_THAT(fair_shares(100_B, modest), ElementsAre(10_B, 45_B, 45_B));
  EXPECT_THAT(fair_shares(1000_B, modest), ElementsAre(10_B, 100_B, 100_B));
  EXPECT_TRUE(fair_shares(7_B, {}).empty());
}

TEST(FairShares, WeightsCountAndFloorsHold) {
  const std::vector<Claim> weighted = {{100_B, 0_B, 3}, {100_B, 0_B, 1}};
  EXPECT_THAT(fair_shares(80_B, weighted), ElementsAre(60_B, 20_B));
  const std::vector<Claim> guaranteed = {{100_B, 70_B, 1}, {100_B, 0_B, 1}, {100_B, 0_B, 1}};
  EXPECT_THAT(fair_shares(100_B, guaranteed), ElementsAre(70_B, 15_B, 15_B));
  const std::vector<Claim> unused = {{20_B, 70_B, 1}, {100_B, 0_B, 1}};
  EXPECT_THAT(fair_shares(100_B, unused), ElementsAre(20_B, 80_B)) << "a floor nobody asks for is nobody's";
  const std::vector<Claim> too_much = {{100_B, 90_B, 1}, {100_B, 60_B, 1}};
  EXPECT_THAT(fair_shares(100_B, too_much), ElementsAre(60_B, 40_B)) << "cut in proportion";
}

TEST(FairShares, LargestAmountsDoNotOverflow) {
  const Bytes most(UINT64_MAX);
  const std::vector<Claim> claims = {{most, 0_B, 1000}, {most, 0_B, 1000}, {most, most, 1}};
  const auto shares = fair_shares(most, claims);
  EXPECT_EQ(shares[2], most);
  EXPECT_EQ(fair_shares(most, std::vector<Claim>{{most, 0_B, 4}})[0], most);
}

// Against one that hands out byte after byte.
TEST(FairShares, AgreesWithHandingOutByteByByte) {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::vector<Claim> claims(1 + random() % 6);
    Bytes demand, floors;
    for (Claim& claim : claims) {
      claim = {Bytes(random() % 60), Bytes(random() % 3 == 0 ? random() % 40 : 0),
               static_cast<std::uint32_t>(1 + random() % 5)};
      demand += claim.demand;
      floors += std::min(claim.demand, claim.floor);
    }
    const Bytes budget(random() % 150);
    const auto shares = fair_shares(budget, claims);
    const Bytes sum = std::accumulate(shares.begin(), shares.end(), Bytes());
    if (floors > budget) {
      EXPECT_LE(sum, budget);
      continue;
    }
    ASSERT_EQ(sum, std::min(budget, demand));
    const auto wanted = test::shares_byte_by_byte(budget, claims);
    for (std::size_t i = 0; i < claims.size(); ++i) {
      const std::uint64_t off =
          shares[i] > wanted[i] ? (shares[i] - wanted[i]).count() : (wanted[i] - shares[i]).count();
      ASSERT_LE(off, claims[i].weight) << "round " << round << " claim " << i;
      ASSERT_GE(shares[i], std::min(claims[i].demand, claims[i].floor));
    }
  }
}

}  // namespace
}  // namespace terrace
