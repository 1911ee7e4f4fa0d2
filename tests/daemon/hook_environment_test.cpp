// What `terrace run` tells the preload library and PyTorch.
#include "daemon/hook_environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

namespace terrace {
namespace {

using testing::HasSubstr;

std::map<std::string, std::string> environment_of(const Policy& policy, GuestAllocator allocator) {
  const auto made = hook_environment(policy, allocator);
  EXPECT_TRUE(made.ok());
  return made ? std::map<std::string, std::string>(made->begin(), made->end())
              : std::map<std::string, std::string>();
}

class HookEnvironment : public testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("PYTORCH_ALLOC_CONF");
    ::unsetenv("PYTORCH_CUDA_ALLOC_CONF");
  }
  void TearDown() override { SetUp(); }
};

TEST_F(HookEnvironment, ThePolicysAmountsAreUnderstoodOnTheOtherSide) {
  Policy policy;
  for (const Amount& budget :
       {Amount(), Amount::of(40_GiB), Amount::of_share(0.7), Amount::of_share(1.0 / 3)}) {
    policy.hbm.budget = budget;
    const auto said = parse_amount(environment_of(policy, GuestAllocator::kNative)["TERRACE_HBM_BUDGET"]);
    ASSERT_TRUE(said.ok());
    EXPECT_EQ(said->form, budget.form);
    EXPECT_EQ(said->bytes, budget.bytes);
    EXPECT_NEAR(said->share, budget.share, 1e-10);
  }
}

TEST_F(HookEnvironment, NativeLeavesPyTorchAlone) {
  const auto made = environment_of(Policy(), GuestAllocator::kNative);
  for (const auto& [name, value] : made) EXPECT_EQ(name.rfind("TERRACE_", 0), 0u) << name;
}

TEST_F(HookEnvironment, WhatMayLeaveHbmHasTheDdrBudget) {
  Policy policy;
  policy.ddr.budget = Amount::of(3_GiB);
  auto made = environment_of(policy, GuestAllocator::kNative);
  EXPECT_EQ(parse_amount(made["TERRACE_DDR_BUDGET"])->bytes, 3_GiB);
  EXPECT_EQ(made.count("TERRACE_HOOK_SPILL"), 0u);
  policy.hook.spill = SpillWord::kAlways;
  EXPECT_EQ(environment_of(policy, GuestAllocator::kNative)["TERRACE_HOOK_SPILL"], "always");
  policy.hook.spill = SpillWord::kOff;
  made = environment_of(policy, GuestAllocator::kNative);
  EXPECT_EQ(made["TERRACE_HOOK_SPILL"], "off");
  EXPECT_EQ(made.count("TERRACE_DDR_BUDGET"), 0u);
  policy.hook.spill = SpillWord::kAuto;
  policy.swapcore.mode = SwapMode::kOff;
  EXPECT_EQ(environment_of(policy, GuestAllocator::kNative)["TERRACE_HOOK_SPILL"], "off");
}

TEST_F(HookEnvironment, ExtendedReportsTheDdrBudget) {
  Policy policy;
  policy.hook.report = MemoryReport::kExtended;
  policy.ddr.budget = Amount::of(3_GiB);
  auto made = environment_of(policy, GuestAllocator::kNative);
  EXPECT_EQ(made["TERRACE_HOOK_REPORT"], "extended");
  EXPECT_EQ(parse_amount(made["TERRACE_DDR_BUDGET"])->bytes, 3_GiB);
}

TEST_F(HookEnvironment, OtherSettingsOfPyTorchStay) {
  ::setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2]", 1);
  auto made = environment_of(Policy(), GuestAllocator::kTerrace);
  EXPECT_EQ(made["TERRACE_ALLOCATOR"], "terrace");
  EXPECT_EQ(made["PYTORCH_ALLOC_CONF"],
            "max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2],backend:cudaMallocAsync");
  EXPECT_EQ(made["PYTORCH_CUDA_ALLOC_CONF"], "backend:cudaMallocAsync");
}

TEST_F(HookEnvironment, ABackendThatIsSetAlreadyIsKeptOrRefused) {
  EXPECT_EQ(*with_async_backend("X", "a:1, backend:cudaMallocAsync"), "a:1, backend:cudaMallocAsync");
  EXPECT_EQ(*with_async_backend("X", "  "), "  backend:cudaMallocAsync");
  ::setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,backend:native", 1);
  const auto refused = hook_environment(Policy(), GuestAllocator::kTerrace);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
  EXPECT_THAT(refused.error().text, HasSubstr("PYTORCH_CUDA_ALLOC_CONF: backend:native contradicts"));
  EXPECT_TRUE(hook_environment(Policy(), GuestAllocator::kNative).ok());
}

TEST_F(HookEnvironment, AllocatorsHaveTwoNames) {
  EXPECT_EQ(*guest_allocator_named(""), GuestAllocator::kNative);
  EXPECT_EQ(*guest_allocator_named("terrace"), GuestAllocator::kTerrace);
  EXPECT_THAT(guest_allocator_named("async").error().text, HasSubstr("use \"native\" or \"terrace\""));
}

}  // namespace
}  // namespace terrace
