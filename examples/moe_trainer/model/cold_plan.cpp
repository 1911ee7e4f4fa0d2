#include "examples/moe_trainer/model/cold_plan.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "examples/moe_trainer/expert_store.hpp"

namespace terrace::trainer {

namespace {

// Of `over` bytes, what frozen experts do not free.
Bytes plan_experts(const DdrDemand& demand, Bytes over, ColdPlan& plan) {
  Bytes frozen;
  for (const DdrDemand::Group& group : demand.groups) frozen += group.frozen;
  if (frozen == 0_B) return over;
  const double share = static_cast<double>(over.count()) / static_cast<double>(frozen.count());
  for (std::size_t i = 0; i < plan.groups.size(); ++i) {
    const DdrDemand::Group& group = demand.groups[i];
    if (group.frozen == 0_B) continue;
    const auto wanted = static_cast<std::int64_t>(std::ceil(share * static_cast<double>(group.experts)));
    plan.groups[i].experts = std::min(wanted, group.experts - 1);
    plan.experts += group.frozen / static_cast<std::uint64_t>(group.experts) *
                    static_cast<std::uint64_t>(plan.groups[i].experts);
  }
  return over - std::min(over, plan.experts);
}

void plan_state(const DdrDemand& demand, Bytes over, ColdPlan& plan) {
  std::vector<Bytes> all;
  for (const DdrDemand::Group& group : demand.groups)
    all.insert(all.end(), group.chunks.begin(), group.chunks.end());
  const Bytes total = std::accumulate(all.begin(), all.end(), 0_B);
  const std::vector<StateTier> tiers = ExpertStore::spread(all, total - std::min(total, over));
  std::size_t next = 0;
  for (std::size_t i = 0; i < plan.groups.size(); ++i) {
    for (const Bytes bytes : demand.groups[i].chunks) {
      const bool goes = tiers[next++] == StateTier::kDdr;  // which there means: does not stay
      plan.groups[i].chunks.push_back(goes);
      if (goes) plan.state += bytes;
    }
  }
}

}  // namespace

ColdPlan plan_cold(const DdrDemand& demand) {
  ColdPlan plan{.groups = std::vector<ColdPlan::Group>(demand.groups.size()), .experts = {}, .state = {}};
  Bytes all = demand.fixed;
  for (const DdrDemand::Group& group : demand.groups) {
    all = std::accumulate(group.chunks.begin(), group.chunks.end(), all + group.frozen);
  }
  if (all <= demand.budget) return plan;
  const Bytes over = plan_experts(demand, all - demand.budget, plan);
  if (over > 0_B) plan_state(demand, over, plan);
  return plan;
}

}  // namespace terrace::trainer
