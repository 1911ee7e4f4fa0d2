// What goes to NVMe, by a plan that has no device.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "examples/moe_trainer/model/cold_plan.hpp"

namespace terrace::trainer {
namespace {

// Four layers of 16 chunks of a megabyte, and what experts are frozen.
DdrDemand demand(Bytes budget, Bytes frozen = {}) {
  DdrDemand all{.budget = budget, .fixed = 2_MiB, .groups = {}};
  for (int i = 0; i < 4; ++i) {
    all.groups.push_back({.frozen = frozen, .experts = 8, .chunks = std::vector<Bytes>(16, 1_MiB)});
  }
  return all;
}

std::string placed(const ColdPlan& plan) {
  std::string text;
  for (const ColdPlan::Group& group : plan.groups) {
    for (const bool cold : group.chunks) text += cold ? 'f' : 'd';
  }
  return text;
}

TEST(ColdPlan, NothingGoesWhereThereIsRoom) {
  const ColdPlan plan = plan_cold(demand(66_MiB));
  EXPECT_EQ(plan.state + plan.experts, 0_B);
  EXPECT_EQ(placed(plan), "");
}

TEST(ColdPlan, WhatGoesIsEnoughAndNoMoreAndSpread) {
  const ColdPlan quarter = plan_cold(demand(50_MiB));
  EXPECT_EQ(quarter.state, 16_MiB);
  EXPECT_EQ(placed(quarter).find("ff"), std::string::npos) << placed(quarter);
  EXPECT_EQ(placed(quarter).find("dddd"), std::string::npos) << placed(quarter);
  EXPECT_EQ(plan_cold(demand(50_MiB - 1_B)).state, 17_MiB) << "whole chunks";
  EXPECT_EQ(placed(plan_cold(demand(1_MiB))), std::string(64, 'f')) << "all there is";
}

TEST(ColdPlan, FrozenExpertsGoFirstAndNeverAll) {
  const ColdPlan some = plan_cold(demand(70_MiB, 8_MiB));
  EXPECT_EQ(some.experts, 28_MiB);
  EXPECT_EQ(some.state, 0_B);
  const ColdPlan more = plan_cold(demand(66_MiB, 8_MiB));
  EXPECT_EQ(more.experts, 28_MiB) << "of each layer one stays";
  EXPECT_EQ(more.state, 4_MiB);
}

}  // namespace
}  // namespace terrace::trainer
