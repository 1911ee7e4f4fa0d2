#include "examples/moe_trainer/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

double learning_rate_at(const TrainConfig& config, std::int64_t step) {
  if (step <= config.warmup_steps) {
    return config.learning_rate * static_cast<double>(step) / static_cast<double>(config.warmup_steps);
  }
  const auto span =
      static_cast<double>(std::max<std::int64_t>(1, config.schedule_steps - config.warmup_steps));
  const double done = std::min(1.0, static_cast<double>(step - config.warmup_steps) / span);
  const double share = 0.5 * (1.0 + std::cos(std::numbers::pi * done));
  return config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * share;
}

Optimizer::Optimizer(const TrainConfig& config, Memory& memory)
    : config_(config), sum_of_squares_(memory.tensor(1, 1, Pool::kOptimizer)) {}

void Optimizer::step(Session& session, Ops& ops, const ParameterGroups& groups, const StepsMade& made) {
  const Stream stream = session.compute();
  require(session.device().fill(stream, sum_of_squares_.block->address, 0, sum_of_squares_.bytes()));
  for (const auto& group : groups) group->add_sum_of_squares(ops, stream, sum_of_squares_.f32());
  const double rate = made.model > 0 ? learning_rate_at(config_, made.model) : config_.learning_rate;
  AdamW update{.count = 0,
               .parameter = nullptr,
               .gradient = nullptr,
               .m = nullptr,
               .v = nullptr,
               .learning_rate = static_cast<float>(rate),
               .beta1 = static_cast<float>(config_.beta1),
               .beta2 = static_cast<float>(config_.beta2),
               .eps = static_cast<float>(config_.adam_eps),
               .weight_decay = static_cast<float>(config_.weight_decay),
               .step = made.indexers,
               .sum_of_squares = sum_of_squares_.f32(),
               .clip_norm = static_cast<float>(config_.clip_norm)};
  const bool together = made.model == made.indexers;
  const std::optional<Part> indexers = together ? std::nullopt : std::optional(Part::kIndexer);
  for (const auto& group : groups) group->step(ops, stream, update, indexers);
  if (together || made.model == 0) return;
  update.step = made.model;
  for (const auto& group : groups) group->step(ops, stream, update, Part::kModel);
}

}  // namespace terrace::trainer
