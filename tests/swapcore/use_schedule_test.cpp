#include "swapcore/stable/use_schedule.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace terrace {
namespace {

using testing::ElementsAre;

// Forward, backward and update of four layers' weights and activations: weights three times a step.
std::vector<std::uint32_t> training_step(std::uint32_t layers) {
  std::vector<std::uint32_t> uses;
  for (std::uint32_t i = 0; i < layers; ++i) uses.insert(uses.end(), {i, 100 + i});
  for (std::uint32_t i = layers; i-- > 0;) uses.insert(uses.end(), {100 + i, i, 200 + i});
  for (std::uint32_t i = 0; i < layers; ++i) uses.insert(uses.end(), {i, 200 + i, 300 + i});
  return uses;
}

void feed(UseSchedule& schedule, const std::vector<std::uint32_t>& uses) {
  for (const std::uint32_t block : uses) schedule.use(block);
}

TEST(UseSchedule, LearnsAStepInWhichBlocksAreUsedSeveralTimes) {
  UseSchedule schedule;
  const auto step = training_step(4);
  for (int i = 0; i < 6 && !schedule.learned(); ++i) feed(schedule, step);
  ASSERT_TRUE(schedule.learned());
  // Where one is used twice in a row that counts once.
  UseSchedule counted;
  std::size_t uses = 0;
  std::uint32_t last = ~0U;
  for (const std::uint32_t block : step) uses += std::exchange(last, block) != block ? 1 : 0;
  EXPECT_EQ(schedule.period(), uses);
  feed(schedule, step);
  EXPECT_EQ(schedule.surprises(), 0U);
  EXPECT_THAT(schedule.next(5), ElementsAre(0, 100, 1, 101, 2));
  EXPECT_EQ(schedule.until_next(0), 0U);
  EXPECT_EQ(schedule.until_next(101), 3U);
  EXPECT_EQ(schedule.until_next(303), uses - 1);
  EXPECT_FALSE(schedule.until_next(999));
}

TEST(UseSchedule, KnowsNothingBeforeAStepHasComeBack) {
  UseSchedule schedule;
  std::mt19937 random(3);
  for (int i = 0; i < 5000; ++i) schedule.use(random() % 1000);
  EXPECT_FALSE(schedule.learned());
  EXPECT_TRUE(schedule.next(3).empty());
}

// An evaluation, a logging step: what follows is as before, and the place is found again.
TEST(UseSchedule, FindsItsPlaceAfterUsesThatWerePutInOrLeftOut) {
  UseSchedule schedule;
  const auto step = training_step(20);
  for (int i = 0; i < 4; ++i) feed(schedule, step);
  ASSERT_TRUE(schedule.learned());
  feed(schedule, {700, 701, 702});
  feed(schedule, step);
  EXPECT_TRUE(schedule.learned());
  EXPECT_EQ(schedule.surprises(), 3U);
  std::vector<std::uint32_t> shorter(step.begin() + 3, step.end());
  feed(schedule, shorter);
  feed(schedule, step);
  EXPECT_TRUE(schedule.learned());
  EXPECT_EQ(schedule.surprises(), 4U);
  EXPECT_THAT(schedule.next(3), ElementsAre(0, 100, 1));
}

TEST(UseSchedule, LearnsAnewWhereTheStepBecomesAnother) {
  UseSchedule schedule;
  for (int i = 0; i < 6; ++i) feed(schedule, training_step(10));
  ASSERT_TRUE(schedule.learned());
  const std::size_t before = schedule.period();
  for (int i = 0; i < 8; ++i) feed(schedule, training_step(14));
  ASSERT_TRUE(schedule.learned());
  EXPECT_GT(schedule.period(), before);
  EXPECT_THAT(schedule.next(3), ElementsAre(0, 100, 1));
}

TEST(UseSchedule, ABlockThatIsGoneEndsWhatWasLearnedOfIt) {
  UseSchedule schedule;
  for (int i = 0; i < 6; ++i) feed(schedule, training_step(8));
  schedule.forget(999);
  EXPECT_TRUE(schedule.learned());
  schedule.forget(3);
  EXPECT_FALSE(schedule.learned());
}

// What is foretold is what comes, for random steps of random lengths.
TEST(UseSchedule, RandomStepsAreForetold) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::uint32_t> step(5 + random() % 400);
    for (std::uint32_t& block : step) block = random() % (3 + static_cast<std::uint32_t>(step.size()) / 2);
    UseSchedule schedule;
    for (std::size_t fed = 0; fed < 200 || !schedule.learned(); fed += step.size()) {
      ASSERT_LT(fed, 60 * step.size() + 400) << "seed " << seed;
      feed(schedule, step);
    }
    feed(schedule, step);
    feed(schedule, step);
    EXPECT_EQ(schedule.surprises(), 0U) << "seed " << seed;
  }
}

TEST(UseSchedule, RemembersNoMoreThanItNeeds) {
  UseSchedule schedule({.longest = 50, .proof = 10});
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) schedule.use(random() % 500);
  for (int i = 0; i < 30; ++i) feed(schedule, training_step(2));
  EXPECT_TRUE(schedule.learned());
}

}  // namespace
}  // namespace terrace
