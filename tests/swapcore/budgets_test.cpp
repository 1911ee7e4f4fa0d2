#include "swapcore/budgets.hpp"

#include <gtest/gtest.h>

namespace terrace {
namespace {

DeviceInfo device_of(Bytes capacity) {
  DeviceInfo info;
  info.kind = "emulated";
  info.capacity = capacity;
  return info;
}

TEST(Budgets, AShareLeavesTheReserveAlone) {
  const auto budgets = resolve_budgets(Policy{}, device_of(140_GiB), 100_GiB);
  ASSERT_TRUE(budgets);
  EXPECT_EQ(budgets->hbm, 126_GiB) << "90%";
  EXPECT_EQ(budgets->ddr, 50_GiB) << "half of what the process may use";
  EXPECT_EQ(budgets->swapcore_hbm, budgets->hbm);
  EXPECT_EQ(resolve_budgets(Policy{}, device_of(8_GiB), 8_GiB)->hbm, 6_GiB) << "the reserve binds";
}

TEST(Budgets, ASizeIsTakenAsItIs) {
  Policy policy;
  policy.hbm.budget = Amount::of(100_MiB);
  EXPECT_EQ(resolve_budgets(policy, device_of(1_GiB), 8_GiB)->hbm, 100_MiB);
}

TEST(Budgets, WhatTheDeviceLacksIsRefusedByName) {
  Policy policy;
  policy.hbm.budget = Amount::of(2_GiB);
  const auto refused = resolve_budgets(policy, device_of(1_GiB), 8_GiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kInvalidArgument);
  EXPECT_NE(refused.error().text.find("hbm.budget: 2.0 GiB"), std::string::npos) << refused.error().text;

  policy = {};
  policy.ddr.budget = Amount::of(9_GiB);
  EXPECT_NE(resolve_budgets(policy, device_of(8_GiB), 8_GiB).error().text.find("ddr.budget"),
            std::string::npos);
  policy = {};
  policy.checkpoint.budget = Amount::of(9_GiB);
  EXPECT_NE(resolve_budgets(policy, device_of(8_GiB), 8_GiB).error().text.find("checkpoint.budget"),
            std::string::npos);
}

TEST(Budgets, AReserveThatLeavesNothingIsRefused) {
  EXPECT_NE(resolve_budgets(Policy{}, device_of(1_GiB), 8_GiB).error().text.find("hbm.reserve"),
            std::string::npos);
}

}  // namespace
}  // namespace terrace
