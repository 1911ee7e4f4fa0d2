#include "swapcore/step_schedule.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace terrace {
namespace {

using Pass = StepSchedule::Pass;

struct Shape {
  std::vector<int> layers = {0, 1, 2};
  std::uint32_t micro_batches = 1;
  Bytes output = 64_KiB;
  bool backward = true;
};

// Everything that deviated, in order; a step says so once.
std::vector<Deviation> play(StepSchedule& schedule, const Shape& shape) {
  std::vector<Deviation> said;
  const auto note = [&said](std::optional<Deviation> deviation) {
    if (deviation) said.push_back(*deviation);
  };
  schedule.begin();
  for (std::uint32_t m = 0; m < shape.micro_batches; ++m) {
    for (const int layer : shape.layers) {
      note(schedule.enter(Pass::kForward, layer, m));
      note(schedule.offer(static_cast<std::uint32_t>(layer), m, shape.output));
    }
    if (!shape.backward) continue;
    note(schedule.enter(Pass::kHead, 0, m));
    for (auto layer = shape.layers.rbegin(); layer != shape.layers.rend(); ++layer)
      note(schedule.enter(Pass::kBackward, *layer, m));
  }
  note(schedule.end());
  return said;
}

TEST(StepSchedule, NothingDeviatesBeforeAStepIsLearned) {
  StepSchedule schedule;
  EXPECT_TRUE(play(schedule, {}).empty());
  EXPECT_TRUE(play(schedule, {.layers = {2, 0}, .output = 1_KiB}).empty());
  EXPECT_FALSE(schedule.deviated());
}

TEST(StepSchedule, SaysOnceHowAStepDeviates) {
  StepSchedule schedule;
  (void)play(schedule, {.micro_batches = 2});
  ASSERT_TRUE(schedule.complete());
  schedule.learn();
  EXPECT_TRUE(play(schedule, {.micro_batches = 2}).empty());
  const auto only = [&](const Shape& shape) {
    const auto said = play(schedule, shape);
    EXPECT_TRUE(schedule.deviated());
    EXPECT_EQ(said.size(), 1U);
    return said.empty() ? std::nullopt : std::optional(said.front());
  };
  EXPECT_EQ(only({.layers = {0, 2, 1}, .micro_batches = 2}), Deviation::kLayerOrder);
  EXPECT_EQ(only({.layers = {0, 1}, .micro_batches = 2}), Deviation::kLayerOrder);
  EXPECT_EQ(only({.micro_batches = 3}), Deviation::kMicroBatches);
  EXPECT_EQ(only({.micro_batches = 1}), Deviation::kMicroBatches);
  EXPECT_EQ(only({.micro_batches = 2, .output = 32_KiB}), Deviation::kShape);
  EXPECT_EQ(only({.micro_batches = 2, .output = 128_KiB}), Deviation::kShape);
  EXPECT_TRUE(play(schedule, {.micro_batches = 2}).empty()) << "the learned step is still that";
  EXPECT_FALSE(schedule.deviated());
}

TEST(StepSchedule, AStepWithoutBackwardIsNotComplete) {
  StepSchedule schedule;
  (void)play(schedule, {.backward = false});
  EXPECT_FALSE(schedule.complete());
  (void)play(schedule, {});
  schedule.learn();
  schedule.begin();
  for (const int layer : {0, 1, 2}) {
    (void)schedule.enter(Pass::kForward, layer, 0);
    (void)schedule.offer(static_cast<std::uint32_t>(layer), 0, 64_KiB);
  }
  EXPECT_EQ(schedule.end(), Deviation::kWithoutBackward);
}

TEST(StepSchedule, OutputsOfGroupedProductsMayVaryALittle) {
  StepSchedule schedule;
  (void)play(schedule, {});
  schedule.learn();
  EXPECT_TRUE(play(schedule, {.output = 60_KiB}).empty());
  EXPECT_TRUE(play(schedule, {.output = 70_KiB}).empty());
}

}  // namespace
}  // namespace terrace
