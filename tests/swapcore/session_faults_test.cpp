// What fails or changes under a cached output: it is computed again, and counted under its reason.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "runtime/fault.hpp"
#include "tests/swapcore/session_fixture.hpp"

namespace terrace {
namespace {

constexpr int kLayers = 3;
constexpr Bytes kOutput = 256_KiB;

class SessionFaults : public OneSiteALayer {
 protected:
  SessionFaults() : OneSiteALayer(kLayers, {.capacity = 64_MiB}) {
    policy_.hbm.budget = Amount::of(32_MiB);
    policy_.ddr.budget = Amount::of(32_MiB);
    policy_.ddr.hugepages = HugePages::kOff;
    policy_.swapcore.rules = {{.match = "layer.*.fc", .kind = {}, .action = RuleAction::kDdr}};
  }
  BlockRef computed(int layer) {
    auto block = session_->allocate(kOutput, Pool::kActivation);
    EXPECT_TRUE(block);
    EXPECT_TRUE(device_->fill(compute_, (*block)->address, static_cast<std::uint8_t>(layer + 1), kOutput));
    return *block;
  }
  void expect_output(const BlockRef& block, int layer) {
    EXPECT_TRUE(device_->launch_host(compute_, [at = block->address, layer] {
      EXPECT_EQ(std::to_integer<int>(at[0]), layer + 1);
      EXPECT_EQ(std::to_integer<int>(at[kOutput.count() - 1]), layer + 1);
    }));
  }
  // With faults while outputs are offered, and not while they are computed.
  void forward(const std::optional<FaultPlan>& plan = std::nullopt) {
    session_->begin_step();
    for (int l = 0; l < kLayers; ++l) {
      session_->enter_forward(l);
      const BlockRef output = computed(l);
      std::optional<ScopedFaults> faults;
      if (plan) faults.emplace(*plan);
      session_->offer({site(l)}, output);
    }
  }
  // Returns how many outputs came back, each of them right.
  int backward() {
    int hits = 0;
    session_->enter_head();
    for (int l = kLayers - 1; l >= 0; --l) {
      session_->enter_backward(l);
      if (const BlockRef found = session_->fetch({site(l)}, kOutput)) {
        ++hits;
        expect_output(found, l);
      }
    }
    EXPECT_TRUE(device_->synchronize(compute_));
    session_->end_step();
    return hits;
  }
  [[nodiscard]] std::uint64_t counted(FallbackReason reason) const {
    return session_->counters().fallbacks[static_cast<std::size_t>(reason)];
  }
};

TEST_F(SessionFaults, WithoutThemNothingIsCounted) {
  open();
  forward();
  EXPECT_EQ(backward(), kLayers);
  for (const std::uint64_t count : session_->counters().fallbacks) EXPECT_EQ(count, 0U);
}

TEST_F(SessionFaults, DdrThatOthersHaveFilled) {
  policy_.ddr.budget = Amount::of(2_MiB);
  open();
  const auto taken = session_->allocate_host(2_MiB - 64_KiB, Pool::kOptimizer);
  ASSERT_TRUE(taken) << taken.error().text;
  forward();
  EXPECT_EQ(backward(), 0);
  EXPECT_EQ(counted(FallbackReason::kDdrFull), static_cast<std::uint64_t>(kLayers));
}

// A node that gives no memory any more: mapping, touching or pinning it fails.
TEST_F(SessionFaults, ANodeThatIsGone) {
  for (const FaultPoint point : {FaultPoint::kHostMap, FaultPoint::kDevicePin, FaultPoint::kHostTouch}) {
    sites_.clear();
    session_.reset();
    open();
    forward(FaultPlan{.nth = 1, .only = point, .repeat = 1000});
    EXPECT_EQ(backward(), 0) << name_of(point);
    EXPECT_EQ(counted(FallbackReason::kDdrFull), static_cast<std::uint64_t>(kLayers)) << name_of(point);
    forward();
    EXPECT_EQ(backward(), kLayers) << "it is back";
  }
}

TEST_F(SessionFaults, SpillsThatFail) {
  open();
  forward(fail_call(FaultPoint::kDeviceCopy, 1));
  EXPECT_EQ(backward(), 0);
  EXPECT_EQ(counted(FallbackReason::kCopyFailed), static_cast<std::uint64_t>(kLayers));
}

TEST_F(SessionFaults, HbmThatIsFull) {
  policy_.checkpoint.budget = Amount::of(kOutput);
  policy_.swapcore.rules[0].action = RuleAction::kHbm;
  open();
  forward();
  EXPECT_EQ(backward(), 1);
  EXPECT_EQ(counted(FallbackReason::kHbmFull), static_cast<std::uint64_t>(kLayers - 1));
}

TEST_F(SessionFaults, AShapeThatChangesBetweenForwardAndRecompute) {
  open();
  forward();
  session_->enter_head();
  session_->enter_backward(2);
  EXPECT_EQ(session_->fetch({site(2)}, kOutput + 1_B), nullptr);
  EXPECT_EQ(counted(FallbackReason::kRecomputeShape), 1U);
  session_->end_step();
}

TEST_F(SessionFaults, AnOutputThatWasWrittenAfterItWasOffered) {
  for (const RuleAction action : {RuleAction::kHbm, RuleAction::kDdr}) {
    policy_.swapcore.rules[0].action = action;
    sites_.clear();
    session_.reset();
    open();
    forward();
    session_->changed({site(1)});
    session_->changed({site(1)});
    EXPECT_EQ(backward(), kLayers - 1);
    EXPECT_EQ(counted(FallbackReason::kChangedInPlace), 1U) << "it was dropped once";
    session_->changed({site(0)});
    EXPECT_EQ(counted(FallbackReason::kChangedInPlace), 1U) << "nothing is kept";
  }
}

}  // namespace
}  // namespace terrace
