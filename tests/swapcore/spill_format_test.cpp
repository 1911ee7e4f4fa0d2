// Outputs that travel as 8-bit floats: near what left, and smaller; everything else is exact.
#include "swapcore/spill_format.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "runtime/fault.hpp"
#include "runtime/metrics.hpp"
#include "tests/swapcore/session_fixture.hpp"

namespace terrace {
namespace {

constexpr int kLayers = 3;
constexpr std::uint64_t kNumbers = 50'000;  // of an output; no multiple of 128
constexpr Bytes kOutput{kNumbers * sizeof(float)};

TEST(SpillFormat, WhatTravelsOfAnOutput) {
  EXPECT_EQ(travel_bytes(SpillFormat::kExact, kOutput, Element::kF32), kOutput);
  EXPECT_EQ(travel_bytes(SpillFormat::kFp8, kOutput, Element::kOpaque), kOutput);
  EXPECT_EQ(travel_bytes(SpillFormat::kFp8, kOutput, Element::kF32), Bytes(kNumbers + 391));
  EXPECT_EQ(travel_bytes(SpillFormat::kFp8, kOutput, Element::kBf16), Bytes(2 * kNumbers + 782));
  EXPECT_EQ(travel_bytes(SpillFormat::kFp8, 4_B, Element::kF32), 4_B) << "packing does not pay";
  EXPECT_EQ(travel_bytes(SpillFormat::kFp8, 4097_B, Element::kF32), 4097_B) << "no whole numbers";
}

class PackedOutputs : public OneSiteALayer {
 protected:
  PackedOutputs() : OneSiteALayer(kLayers, {.capacity = 64_MiB}) {
    policy_.hbm.budget = Amount::of(32_MiB);
    policy_.ddr.budget = Amount::of(32_MiB);
    policy_.swapcore.spill_format = SpillFormat::kFp8;
    act(RuleAction::kDdr);
  }
  void act(RuleAction action) {
    policy_.swapcore.rules = {{.match = "layer.*.fc", .kind = {}, .action = action}};
  }
  static float number(int layer, std::uint64_t i) {
    return std::sin(static_cast<float>(i + 1)) * std::ldexp(1.0F, layer * 10);
  }
  BlockRef computed(int layer) {
    auto block = session_->allocate(kOutput, Pool::kActivation);
    EXPECT_TRUE(block);
    EXPECT_TRUE(device_->launch_host(compute_, [at = (*block)->address, layer] {
      auto* numbers = reinterpret_cast<float*>(at);
      for (std::uint64_t i = 0; i < kNumbers; ++i) numbers[i] = number(layer, i);
    }));
    return *block;
  }
  struct Seen {
    int hits = 0;
    bool same = true;        // every bit
    double largest_off = 0;  // as a share of the largest number there is
  };
  Seen run(Element element) {
    Seen seen;
    session_->begin_step();
    for (int l = 0; l < kLayers; ++l) {
      session_->enter_forward(l);
      session_->offer({site(l)}, computed(l), element);
    }
    session_->enter_head();
    for (int l = kLayers - 1; l >= 0; --l) {
      session_->enter_backward(l);
      const BlockRef found = session_->fetch({site(l)}, kOutput);
      if (found == nullptr) continue;
      ++seen.hits;
      EXPECT_EQ(found->size, kOutput);
      EXPECT_TRUE(device_->launch_host(compute_, [&seen, at = found->address, l] {
        const auto* numbers = reinterpret_cast<const float*>(at);
        for (std::uint64_t i = 0; i < kNumbers; ++i) {
          const double off = std::fabs(numbers[i] - number(l, i));
          seen.same = seen.same && off == 0;
          seen.largest_off = std::max(seen.largest_off, off / std::ldexp(1.0, l * 10));
        }
      }));
      EXPECT_TRUE(device_->synchronize(compute_));
    }
    session_->end_step();
    EXPECT_TRUE(device_->synchronize(compute_));
    return seen;
  }
  [[nodiscard]] std::uint64_t counted(FallbackReason reason) const {
    return session_->counters().fallbacks[static_cast<std::size_t>(reason)];
  }
};

TEST_F(PackedOutputs, TravelSmallerAndComeBackNear) {
  metrics().clear();
  open();
  const Bytes before = session_->hbm_usage().live;
  const Seen seen = run(Element::kF32);
  EXPECT_EQ(seen.hits, kLayers);
  EXPECT_FALSE(seen.same);
  EXPECT_LE(seen.largest_off, 1.0 / 16);
  const SessionCounters counters = session_->counters();
  EXPECT_EQ(counters.spilled.count(), kLayers * (kNumbers + 391));
  EXPECT_GT(counters.spill_error_largest, 0.01);
  EXPECT_LE(counters.spill_error_largest, 1.0 / 16);
  EXPECT_GT(counters.spill_error_mean, 0.005);
  EXPECT_LT(counters.spill_error_mean, 1.0 / 16);
  EXPECT_EQ(metrics().value<Metric::kSpillErrorLargest>(),
            static_cast<std::uint64_t>(counters.spill_error_largest * 1e6));
  EXPECT_EQ(metrics().value<Metric::kSpillErrorMean>(),
            static_cast<std::uint64_t>(counters.spill_error_mean * 1e6));
  // Copies end when they end; a step's begin sees which have.
  for (int i = 0; i < 1000 && session_->hbm_usage().live != before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    session_->begin_step();
    session_->end_step();
  }
  EXPECT_EQ(session_->hbm_usage().live, before) << "nothing is left behind";
}

TEST_F(PackedOutputs, WhatStaysInHbmAndWhatIsOpaqueIsExact) {
  for (const RuleAction action : {RuleAction::kHbm, RuleAction::kDdr}) {
    act(action);
    sites_.clear();
    session_.reset();
    open();
    const Seen seen = run(action == RuleAction::kHbm ? Element::kF32 : Element::kOpaque);
    EXPECT_EQ(seen.hits, kLayers);
    EXPECT_TRUE(seen.same);
    EXPECT_EQ(session_->counters().spill_error_largest, 0);
  }
}

TEST_F(PackedOutputs, TheDefaultIsExact) {
  policy_.swapcore.spill_format = Policy{}.swapcore.spill_format;
  open();
  const Seen seen = run(Element::kF32);
  EXPECT_EQ(seen.hits, kLayers);
  EXPECT_TRUE(seen.same);
  EXPECT_EQ(session_->counters().spilled, kLayers * kOutput);
}

TEST_F(PackedOutputs, ThePlanCountsWhatTravels) {
  policy_.swapcore.rules.clear();
  policy_.swapcore.hbm_budget = Amount::of(0_B);
  open();
  for (int i = 0; i < 2; ++i) (void)run(Element::kF32);
  ASSERT_NE(session_->snapshot(), nullptr);
  EXPECT_EQ(session_->snapshot()->sites[0].bytes, kOutput);
  EXPECT_EQ(session_->snapshot()->sites[0].travel_bytes, Bytes(kNumbers + 391));
}

// The session takes one launch for each packing; a refused one costs its output and nothing else.
TEST_F(PackedOutputs, WhatCannotBePackedIsComputedAgain) {
  open();
  session_->begin_step();
  session_->enter_forward(0);
  const BlockRef output = computed(0);
  {
    const ScopedFaults faults(fail_call(FaultPoint::kDeviceLaunch, 1));
    session_->offer({site(0)}, output, Element::kF32);
  }
  EXPECT_EQ(counted(FallbackReason::kCopyFailed), 1U);
  EXPECT_EQ(session_->fetch({site(0)}, kOutput), nullptr);
  session_->end_step();
  EXPECT_EQ(run(Element::kF32).hits, kLayers);
}

TEST_F(PackedOutputs, WhatCannotBeUnpackedIsComputedAgainAndFetchedOnce) {
  open();
  std::uint64_t steps = 0;
  do {  // again where the output has left so late that it is not back: there is nothing to unpack then
    ++steps;
    session_->begin_step();
    session_->enter_forward(0);
    session_->offer({site(0)}, computed(0), Element::kF32);
    session_->enter_head();
    session_->enter_backward(0);
    {
      const ScopedFaults faults(fail_call(FaultPoint::kDeviceLaunch, 1));
      EXPECT_EQ(session_->fetch({site(0)}, kOutput), nullptr);
    }
    EXPECT_TRUE(device_->synchronize(compute_));
    session_->end_step();
  } while (counted(FallbackReason::kNotBack) == steps && steps < 1000);
  EXPECT_EQ(counted(FallbackReason::kCopyFailed), 1U);
  const SessionCounters counters = session_->counters();
  EXPECT_EQ(counters.hits + counters.misses + counters.late, steps);
}

TEST_F(PackedOutputs, AnotherShapeIsAMissOfThePackedFormToo) {
  open();
  session_->begin_step();
  session_->enter_forward(0);
  session_->offer({site(0)}, computed(0), Element::kF32);
  EXPECT_EQ(session_->fetch({site(0)}, Bytes(kNumbers + 391)), nullptr);
  EXPECT_EQ(counted(FallbackReason::kRecomputeShape), 1U);
  session_->end_step();
}

TEST_F(PackedOutputs, AStepThatIsGivenUpFreesThem) {
  open();
  const Bytes before = session_->hbm_usage().live;
  session_->begin_step();
  session_->enter_forward(0);
  session_->offer({site(0)}, computed(0), Element::kF32);
  session_->cancel_step();
  EXPECT_EQ(session_->hbm_usage().live, before);
  EXPECT_EQ(run(Element::kF32).hits, kLayers);
}

}  // namespace
}  // namespace terrace
