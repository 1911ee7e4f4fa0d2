// Steps that go another way than the one that was learned, and steps that are given up.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/swapcore/session_fixture.hpp"

namespace terrace {
namespace {

constexpr int kLayers = 4;
constexpr Bytes kOutput = 256_KiB;

class SessionSchedule : public OneSiteALayer {
 protected:
  struct Way {  // how a step goes
    std::uint32_t micro_batches = 1;
    Bytes output = kOutput;
    bool backward = true;
    std::chrono::microseconds work{50};  // of a site
  };

  SessionSchedule() : OneSiteALayer(kLayers, {.capacity = 64_MiB}) {
    policy_.hbm.budget = Amount::of(32_MiB);
    policy_.ddr.budget = Amount::of(32_MiB);
  }

  BlockRef computed(int layer, const Way& way) {
    const Session::Timing timing(*session_, site(layer));
    auto block = session_->allocate(way.output, Pool::kActivation);
    EXPECT_TRUE(block);
    EXPECT_TRUE(device_->launch_host(compute_, [address = (*block)->address, layer, way] {
      std::memset(address, layer + 1, way.output.count());
      std::this_thread::sleep_for(way.work);
    }));
    return *block;
  }
  void forward(int layer, const Way& way, std::uint32_t micro_batch = 0) {
    session_->enter_forward(layer, micro_batch);
    session_->offer({site(layer), micro_batch}, computed(layer, way));
  }
  // Returns how many outputs came back.
  int backward(const Way& way, std::uint32_t micro_batch = 0) {
    int hits = 0;
    session_->enter_head(micro_batch);
    for (int l = kLayers - 1; l >= 0; --l) {
      session_->enter_backward(l, micro_batch);
      BlockRef output = session_->fetch({site(l), micro_batch}, way.output);
      if (output != nullptr) ++hits;
      if (output == nullptr) output = computed(l, way);
      EXPECT_TRUE(device_->launch_host(compute_, [last = output->address + output->size.count() - 1, l] {
        EXPECT_EQ(std::to_integer<int>(*last), l + 1);
      }));
    }
    return hits;
  }
  int run(const Way& way) {
    int hits = 0;
    session_->begin_step();
    measured_.push_back(session_->plan() == nullptr);
    for (std::uint32_t m = 0; m < way.micro_batches; ++m) {
      for (int l = 0; l < kLayers; ++l) forward(l, way, m);
      if (way.backward) hits += backward(way, m);
    }
    EXPECT_TRUE(device_->synchronize(compute_));
    session_->end_step();
    EXPECT_TRUE(device_->synchronize(compute_)) << "the end of the step has its event";
    return hits;
  }
  [[nodiscard]] std::uint64_t fallbacks(FallbackReason reason) const {
    return session_->counters().fallbacks[static_cast<std::size_t>(reason)];
  }
  [[nodiscard]] std::uint64_t fallbacks() const {
    std::uint64_t all = 0;
    for (const std::uint64_t count : session_->counters().fallbacks) all += count;
    return all;
  }
  // Steps from now until one begins without a plan, at most so many; that one has run.
  int steps_until_measured(const Way& way, int most) {
    for (int i = 1; i <= most; ++i) {
      (void)run(way);
      if (measured_.back()) return i;
    }
    return -1;
  }

  std::vector<bool> measured_;  // by step: it began without a plan
};

TEST_F(SessionSchedule, AForwardPassAloneUsesUpNeitherWarmUpNorMeasuring) {
  open();
  for (int i = 0; i < 3; ++i) run({.backward = false});
  EXPECT_EQ(session_->plan(), nullptr);
  run({});
  run({.backward = false});
  EXPECT_EQ(session_->plan(), nullptr) << "the step that was to be measured had no backward";
  run({});
  ASSERT_NE(session_->plan(), nullptr);
  EXPECT_EQ(run({}), kLayers);
  EXPECT_EQ(fallbacks(), 0U);
}

TEST_F(SessionSchedule, AnOddStepIsCountedAndChangesNothing) {
  open();
  for (int i = 0; i < 2; ++i) run({});
  ASSERT_EQ(run({}), kLayers) << session_->plan_summary();
  const double expected = session_->plan()->prediction.step_seconds;
  run({.backward = false});
  EXPECT_EQ(fallbacks(FallbackReason::kWithoutBackward), 1U);
  run({.output = 64_KiB});
  EXPECT_EQ(fallbacks(FallbackReason::kChangedShape), 1U);
  run({.micro_batches = 2});
  EXPECT_EQ(fallbacks(FallbackReason::kMicroBatches), 1U);
  EXPECT_FALSE(session_->prediction_error()) << "none of them is a measure of the plan";
  EXPECT_EQ(run({}), kLayers);
  EXPECT_EQ(fallbacks(), 3U);
  EXPECT_EQ(session_->plan()->prediction.step_seconds, expected) << "it is the same plan";
}

// What the plan sends away stays where it is in a step that goes another way: its windows are not those of
// the plan.
TEST_F(SessionSchedule, NothingTravelsInAStepThatGoesAnotherWay) {
  policy_.swapcore.hbm_budget = Amount::of(0_B);
  open();
  const Way slow{.work = std::chrono::milliseconds(2)};
  for (int i = 0; i < 3; ++i) run(slow);
  ASSERT_GT(session_->plan()->ddr_sites, 0) << session_->plan_summary();
  const Bytes spilled = session_->counters().spilled;
  ASSERT_GT(spilled, 0_B);
  run({.output = 64_KiB});
  EXPECT_EQ(session_->counters().spilled, spilled);
  EXPECT_EQ(fallbacks(), 1U) << "and is not counted output by output";
}

TEST_F(SessionSchedule, AStepThatIsGivenUpFreesEverything) {
  policy_.swapcore.rules = {{.match = "layer.*.fc", .kind = {}, .action = RuleAction::kDdr}};
  open();
  for (int how = 0; how < 2; ++how) {
    session_->begin_step();
    for (int l = 0; l < kLayers; ++l) {
      session_->enter_forward(l);
      ASSERT_TRUE(session_->save({.layer = l}, computed(l, {})));
      session_->offer({site(l)}, computed(l, {}));
    }
    session_->enter_head();
    session_->enter_backward(kLayers - 1);
    if (how == 0) {
      session_->cancel_step();
      EXPECT_TRUE(device_->synchronize(compute_));
      EXPECT_EQ(session_->hbm_usage().live, 0_B);
      EXPECT_EQ(session_->ddr_usage().live, 0_B);
    }
    EXPECT_EQ(run({}) >= 0, true) << "the same keys are free again";
    EXPECT_EQ(fallbacks(FallbackReason::kStepCancelled), static_cast<std::uint64_t>(how + 1));
  }
  session_->cancel_step();
  EXPECT_EQ(fallbacks(FallbackReason::kStepCancelled), 2U) << "no step runs";
}

TEST_F(SessionSchedule, WhatNobodyAsksForGoesWithItsStep) {
  open();
  session_->begin_step();
  ASSERT_TRUE(session_->save({.layer = 0}, computed(0, {})));
  session_->end_step();
  EXPECT_TRUE(device_->synchronize(compute_));
  EXPECT_EQ(session_->hbm_usage().live, 0_B);
  EXPECT_EQ(session_->load({.layer = 0}).error().code, Errc::kNotFound);
}

TEST_F(SessionSchedule, SavingTwiceIsRefusedAndKeepsTheFirst) {
  open();
  session_->begin_step();
  const BlockRef first = computed(0, {});
  ASSERT_TRUE(session_->save({.layer = 0}, first));
  const Status again = session_->save({.layer = 0}, computed(1, {}));
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, Errc::kInvalidArgument);
  EXPECT_NE(again.error().text.find("layer 0 saved twice"), std::string::npos) << again.error().text;
  EXPECT_EQ(*session_->load({.layer = 0}), first);
  session_->end_step();
}

TEST_F(SessionSchedule, AnOutputOfAnotherShapeIsAMiss) {
  policy_.swapcore.rules = {{.match = "layer.*.fc", .kind = {}, .action = RuleAction::kHbm}};
  open();
  session_->begin_step();
  for (int l = 0; l < 2; ++l) forward(l, {});
  EXPECT_EQ(session_->fetch({site(1)}, kOutput + 1_B), nullptr);
  EXPECT_EQ(fallbacks(FallbackReason::kRecomputeShape), 1U);
  EXPECT_NE(session_->fetch({site(0)}, kOutput), nullptr);
  session_->end_step();
}

// An evaluation through the same sites between a forward pass and its backward: its outputs must not come
// back as those of training, whichever of the two was kept.
TEST_F(SessionSchedule, AnOutputOfferedTwiceComesBackInNeitherForm) {
  policy_.swapcore.rules = {{.match = "layer.*.fc", .kind = {}, .action = RuleAction::kHbm}};
  open();
  session_->begin_step();
  for (int pass = 0; pass < 2; ++pass) forward(0, {});
  EXPECT_EQ(fallbacks(FallbackReason::kOfferedTwice), 1U);
  forward(0, {});
  EXPECT_EQ(session_->fetch({site(0)}), nullptr);
  EXPECT_EQ(session_->fetch({site(0)}), nullptr);
  EXPECT_EQ(session_->fetch({site(0)}), nullptr);
  forward(0, {});
  EXPECT_NE(session_->fetch({site(0)}), nullptr) << "as often asked for as offered: it is clear again";
  session_->end_step();
}

TEST_F(SessionSchedule, OutsideOfAStepNothingIsKept) {
  policy_.swapcore.rules = {{.match = "layer.*.fc", .kind = {}, .action = RuleAction::kHbm}};
  open();
  forward(0, {});
  EXPECT_EQ(session_->fetch({site(0)}), nullptr);
  EXPECT_TRUE(device_->synchronize(compute_));
  EXPECT_EQ(session_->hbm_usage().live, 0_B);
}

TEST_F(SessionSchedule, AChangeThatStaysIsLearned) {
  open();
  for (int i = 0; i < 4; ++i) run({});
  const Way now{.micro_batches = 2, .output = 128_KiB};
  ASSERT_GT(steps_until_measured(now, 12), 2);
  const std::uint64_t deviated = fallbacks();
  EXPECT_EQ(session_->snapshot()->micro_batches, 2);
  EXPECT_EQ(run(now), 2 * kLayers);
  EXPECT_EQ(fallbacks(), deviated) << "that is how steps go now";
}

TEST_F(SessionSchedule, AJobWhoseSitesTakeLongerIsMeasuredAgainAndMoreSeldomEachTime) {
  open();
  const Way quick{.work = std::chrono::microseconds(100)};
  const Way slow{.work = std::chrono::milliseconds(5)};
  const auto measured = [this] { return session_->snapshot()->layers[0].forward_seconds; };
  for (int i = 0; i < 24; ++i) run(quick);  // the device is warm, and measured as such
  ASSERT_NE(session_->plan(), nullptr);
  const double when_quick = measured();
  ASSERT_GT(steps_until_measured(slow, 30), 0);
  const double when_slow = measured();
  EXPECT_GT(when_slow, when_quick);
  ASSERT_NE(session_->plan(), nullptr) << "planned anew";
  for (int i = 0; i < 4; ++i) run(slow);
  EXPECT_GE(steps_until_measured(quick, 60), 12) << "the second time it waits for sixteen steps";
  EXPECT_LT(measured(), when_slow);
}

}  // namespace
}  // namespace terrace
