// Which parts stay in HBM: the most used, with a count that fades and a margin against trading places.
#include "swapcore/streamed/hot_set.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace terrace {
namespace {

using Uses = std::vector<std::int64_t>;

std::set<std::uint32_t> placed(const HotSet& hot) { return {hot.places().begin(), hot.places().end()}; }

TEST(HotSet, TheMostUsedGetThePlaces) {
  HotSet hot(6, 2);
  EXPECT_EQ(placed(hot), (std::set<std::uint32_t>{0, 1})) << "before anything is known";
  const auto changes = hot.end_step(Uses{0, 5, 0, 9, 0, 7});
  EXPECT_EQ(changes, (std::vector<HotSet::Change>{{0, 0, 3}, {1, 1, 5}}));
  EXPECT_TRUE(hot.has_place(3) && hot.has_place(5));
  EXPECT_FALSE(hot.has_place(0) || hot.has_place(1));
}

TEST(HotSet, NearlyEqualLoadsDoNotTradePlaces) {
  HotSet hot(2, 1);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(hot.end_step(Uses{10, 12}).empty());
  EXPECT_EQ(hot.end_step(Uses{10, 40}).size(), 1U);
}

TEST(HotSet, WhatWasIsForgotten) {
  HotSet hot(2, 1);
  (void)hot.end_step(Uses{1000, 0});
  int steps = 0;
  while (!hot.has_place(1)) {
    (void)hot.end_step(Uses{0, 100});
    ASSERT_LT(++steps, 40);
  }
  EXPECT_GT(steps, 1) << "one step does not outweigh all before it";
}

TEST(HotSet, APartHasOnePlace) {
  std::mt19937 random(3);
  for (const std::size_t places : {0U, 1U, 5U, 8U}) {
    HotSet hot(8, places);
    for (int step = 0; step < 200; ++step) {
      Uses uses(8);
      for (auto& use : uses) use = static_cast<std::int64_t>(random() % 50);
      const std::vector<std::uint32_t> before(hot.places().begin(), hot.places().end());
      for (const HotSet::Change& change : hot.end_step(uses)) {
        EXPECT_EQ(before[change.place], change.leaves);
        EXPECT_EQ(hot.places()[change.place], change.comes);
      }
      ASSERT_EQ(placed(hot).size(), places);
      for (std::uint32_t part = 0; part < 8; ++part)
        ASSERT_EQ(hot.has_place(part), placed(hot).contains(part));
    }
  }
}

}  // namespace
}  // namespace terrace
