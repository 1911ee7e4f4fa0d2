// What the store of experts is told of a pass.
#pragma once

#include "examples/moe_trainer/expert_store.hpp"
#include "examples/moe_trainer/model/pass.hpp"

namespace terrace::trainer {

[[nodiscard]] inline ExpertStore::Walk expert_walk(const Pass& pass) {
  const bool back = pass.phase == Phase::kRecompute || pass.phase == Phase::kBackward;
  return {.way = back ? ExpertStore::Way::kBackward : ExpertStore::Way::kForward,
          .micro_batch = pass.micro_batch,
          .trains = back || pass.phase == Phase::kForward};
}

}  // namespace terrace::trainer
