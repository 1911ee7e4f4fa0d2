#include "swapcore/stable/stay_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace terrace {
namespace {

std::vector<CycleUse> uses_of(const std::vector<std::uint32_t>& blocks) {
  std::vector<CycleUse> cycle;
  for (const std::uint32_t block : blocks) cycle.push_back({block, 2_MiB});
  return cycle;
}
std::vector<CycleUse> in_order(std::uint32_t blocks) {
  std::vector<CycleUse> cycle;
  for (std::uint32_t i = 0; i < blocks; ++i) cycle.push_back({i, 2_MiB});
  return cycle;
}

// The most that is held at a time by blocks that stay, counted place by place.
Bytes most_held(const std::vector<CycleUse>& cycle, const std::vector<bool>& stays) {
  std::vector<Bytes> held(cycle.size());
  for (std::size_t i = 0; i < cycle.size(); ++i) {
    if (!stays[i]) continue;
    std::size_t at = i;
    do {
      held[at % cycle.size()] += cycle[i].size;
      ++at;
    } while (cycle[at % cycle.size()].block != cycle[i].block);
  }
  return *std::max_element(held.begin(), held.end());
}

// However many of the blocks stay: nowhere in the cycle do many travel in a row while elsewhere many stay.
TEST(StayPlan, WhatStaysLiesEvenlyAmongWhatTravels) {
  for (std::uint32_t staying = 1; staying < 64; ++staying) {
    const std::vector<bool> stays = choose_stays(in_order(64), staying * 2_MiB);
    ASSERT_EQ(std::count(stays.begin(), stays.end(), true), staying);
    for (std::size_t from = 0; from < 64; ++from) {
      int in_window = 0;
      for (std::size_t i = from; i < from + 16; ++i) in_window += stays[i % 64] ? 1 : 0;
      EXPECT_NEAR(in_window, staying / 4.0, 2.0) << staying << " from " << from;
    }
  }
}

TEST(StayPlan, WhatIsUsedAgainSoonStaysFirst) {
  // 1 is used every other time, the others once.
  const std::vector<bool> stays = choose_stays(uses_of({1, 2, 1, 3, 1, 4, 1, 5}), 2_MiB);
  EXPECT_EQ(stays, (std::vector<bool>{true, false, true, false, true, false, true, false}));
}

TEST(StayPlan, WhatIsLeftBetweenTwoStaysIsUsedForOthers) {
  // 1 stays in the first half, 2 in the second: one room for both.
  const std::vector<bool> stays = choose_stays(uses_of({1, 9, 1, 8, 2, 7, 2, 6}), 2_MiB);
  EXPECT_TRUE(stays[0]);
  EXPECT_TRUE(stays[4]);
}

TEST(StayPlan, WithRoomForAllEverythingStaysAndWithNoneNothing) {
  const std::vector<CycleUse> cycle = in_order(9);
  for (const bool stays : choose_stays(cycle, 18_MiB)) EXPECT_TRUE(stays);
  for (const bool stays : choose_stays(cycle, 0_B)) EXPECT_FALSE(stays);
  EXPECT_TRUE(choose_stays({}, 1_GiB).empty());
}

TEST(StayPlan, NeverMoreThanThereIsRoomFor) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::map<std::uint32_t, Bytes> sizes;
    std::vector<CycleUse> cycle(2 + random() % 100);
    Bytes all;
    for (CycleUse& use : cycle) {
      use.block = random() % 40;
      const auto [size, fresh] = sizes.try_emplace(use.block, (1 + random() % 9) * 2_MiB);
      use.size = size->second;
      if (fresh) all += use.size;
    }
    const Bytes room = all / (1 + random() % 4);
    EXPECT_LE(most_held(cycle, choose_stays(cycle, room)), room) << seed;
  }
}

}  // namespace
}  // namespace terrace
