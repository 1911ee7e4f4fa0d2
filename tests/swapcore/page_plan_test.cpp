#include "swapcore/stable/page_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace terrace {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Address at(std::uintptr_t number) { return reinterpret_cast<Address>(number << 21); }

PagedBlock in_hbm(std::uintptr_t number, std::optional<std::size_t> next, std::uint64_t last_use = 0) {
  return {.at = at(number), .size = 2_MiB, .in_hbm = true, .next = next, .last_use = last_use};
}
PagedBlock in_ddr(std::uintptr_t number, std::optional<std::size_t> next) {
  return {.at = at(number), .size = 2_MiB, .in_hbm = false, .next = next};
}

TEST(PagePlan, WhatIsUsedSoonestTakesThePlaceOfWhatIsUsedLast) {
  const std::vector<PagedBlock> blocks = {in_hbm(1, 2), in_hbm(2, 90), in_hbm(3, 50), in_ddr(4, 7),
                                          in_ddr(5, 4)};
  const PagePlan plan = plan_pages(blocks, {.room = 0_B, .uses_ahead = 100, .bytes_ahead = 1_GiB});
  EXPECT_THAT(plan.to_hbm, ElementsAre(at(5), at(4)));
  EXPECT_THAT(plan.to_ddr, ElementsAre(at(2), at(3)));
  EXPECT_THAT(plan.behind, ElementsAre(1, 2)) << "each behind what makes room for it";
}

TEST(PagePlan, NothingGoesForWhatIsUsedLaterThanItself) {
  const std::vector<PagedBlock> blocks = {in_hbm(1, 2), in_hbm(2, 5), in_ddr(3, 7)};
  const PagePlan plan = plan_pages(blocks, {.room = 0_B, .uses_ahead = 100, .bytes_ahead = 1_GiB});
  EXPECT_THAT(plan.to_hbm, IsEmpty());
  EXPECT_THAT(plan.to_ddr, IsEmpty());
}

TEST(PagePlan, AsFarAheadAsIsAskedFor) {
  const std::vector<PagedBlock> blocks = {in_ddr(1, 3), in_ddr(2, 5), in_ddr(3, 30)};
  PagePlan plan = plan_pages(blocks, {.room = 1_GiB, .uses_ahead = 10, .bytes_ahead = 1_GiB});
  EXPECT_THAT(plan.to_hbm, ElementsAre(at(1), at(2)));
  plan = plan_pages(blocks, {.room = 1_GiB, .uses_ahead = 100, .bytes_ahead = 2_MiB});
  EXPECT_THAT(plan.to_hbm, ElementsAre(at(1)));
}

TEST(PagePlan, WhatIsPinnedOrMovesIsLeftAlone) {
  std::vector<PagedBlock> blocks = {in_hbm(1, 90), in_ddr(2, 1)};
  blocks[0].movable = false;
  EXPECT_THAT(plan_pages(blocks, {.room = 0_B, .uses_ahead = 9, .bytes_ahead = 1_GiB}).to_hbm, IsEmpty());
  EXPECT_THAT(make_room(blocks, 0_B, 2_MiB, {}), IsEmpty());
}

TEST(PagePlan, RoomIsMadeByTheLeastRecentWhereNothingIsKnown) {
  const std::vector<PagedBlock> blocks = {in_hbm(1, std::nullopt, 9), in_hbm(2, std::nullopt, 3),
                                          in_hbm(3, 1)};
  EXPECT_THAT(make_room(blocks, 0_B, 3_MiB, {}), ElementsAre(at(2), at(1)));
  const std::vector<Address> spared = {at(2)};
  EXPECT_THAT(make_room(blocks, 0_B, 2_MiB, spared), ElementsAre(at(1)));
  EXPECT_THAT(make_room(blocks, 0_B, 1_GiB, {}), IsEmpty());
}

// Carried out again and again, with nothing used meanwhile, plans come to an end, and room is never
// overdrawn.
TEST(PagePlan, PlansEnd) {
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    std::vector<PagedBlock> blocks;
    for (std::uintptr_t i = 1; i < 2 + random() % 30; ++i) {
      PagedBlock block = random() % 2 == 0 ? in_hbm(i, random() % 60) : in_ddr(i, random() % 60);
      block.size = (1 + random() % 8) * 2_MiB;
      block.movable = random() % 8 != 0;
      if (random() % 6 == 0) block.next.reset();
      blocks.push_back(block);
    }
    Bytes room = (random() % 6) * 2_MiB;
    int plans = 0;
    for (;; ++plans) {
      ASSERT_LT(plans, 40) << seed;
      const PagePlan plan = plan_pages(blocks, {.room = room, .uses_ahead = 50, .bytes_ahead = 16_MiB});
      if (plan.to_hbm.empty()) break;
      const auto moves = [&](const std::vector<Address>& which, bool back) {
        for (const Address address : which) {
          auto block =
              std::find_if(blocks.begin(), blocks.end(), [&](const auto& b) { return b.at == address; });
          ASSERT_TRUE(block->movable && block->in_hbm != back);
          block->in_hbm = back;
          ASSERT_TRUE(!back || block->size <= room);
          room = back ? room - block->size : room + block->size;
        }
      };
      moves(plan.to_ddr, false);
      moves(plan.to_hbm, true);
    }
  }
}

}  // namespace
}  // namespace terrace
