// AdamW with decoupled decay of matrices, clipping by the global norm, linear warm-up and cosine decay.
#pragma once

#include <cstdint>

#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

// Of step 1, 2, ...: rises linearly over warmup_steps, then falls along a half cosine to final_learning_rate
// at schedule_steps, and stays there.
[[nodiscard]] double learning_rate_at(const TrainConfig& config, std::int64_t step);

// How many steps each part of a model has made, this one included. The model has made none while its indexers
// warm up.
struct StepsMade {
  std::int64_t model = 0, indexers = 0;
};

class Optimizer {
 public:
  Optimizer(const TrainConfig& config, Memory& memory);
  // Steps every group by its gradients. The schedule is the model's; indexers that warm up go at the full
  // rate.
  void step(Session& session, Ops& ops, const ParameterGroups& groups, const StepsMade& made);

 private:
  const TrainConfig& config_;
  Tensor sum_of_squares_;
};

}  // namespace terrace::trainer
