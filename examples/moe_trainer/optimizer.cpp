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

Optimizer::Optimizer(const TrainConfig& config, Memory& memory, const ParameterGroups& groups)
    : config_(config),
      memory_(memory),
      session_(memory.session()),
      groups_(groups),
      sum_of_squares_(memory.tensor(1, 1, Pool::kOptimizer)),
      state_(StateStream::of(session_, order())) {}

// The groups whose state lives in DDR, as they will be stepped; fills early_.
StateStream::Groups Optimizer::order() {
  StateStream::Groups early, late;
  std::int64_t total = 0, before = 0;
  for (const auto& group : groups_) total += group->streamed_count();
  for (const auto& group : groups_) {
    const std::int64_t count = group->streamed_count();
    if (count == 0) continue;
    const bool first_third = before < total / 3;
    before += count;
    if (clips() || first_third) {
      late.push_back(group.get());
    } else {
      early.insert(early.begin(), group.get());
      early_.insert(group.get());
    }
  }
  early.insert(early.end(), late.begin(), late.end());
  return early;
}

double Optimizer::rate(const StepsMade& made) const {
  return made.model > 0 ? learning_rate_at(config_, made.model) : config_.learning_rate;
}

// Both parts go by the schedule of the model; which of them steps is all that differs.
void Optimizer::step_matrices(Ops& ops, const ParameterGroup& group, const StepsMade& made) const {
  const Muon update{.matrices = 0,
                    .rows = 0,
                    .columns = 0,
                    .parameter = nullptr,
                    .gradient = nullptr,
                    .momentum = nullptr,
                    .learning_rate = static_cast<float>(rate(made)),
                    .momentum_factor = static_cast<float>(config_.muon_momentum),
                    .weight_decay = static_cast<float>(config_.weight_decay),
                    .products = config_.compute};
  const std::optional<Part> only = made.model > 0 ? std::nullopt : std::optional(Part::kIndexer);
  group.step_matrices(ops, memory_, session_.compute(), update, only);
}

// One update of everything, or one of each part where they have made different numbers of steps.
std::vector<StateStream::Update> Optimizer::updates(const StepsMade& made) const {
  AdamW update{.count = 0,
               .parameter = nullptr,
               .gradient = nullptr,
               .m = nullptr,
               .v = nullptr,
               .learning_rate = static_cast<float>(rate(made)),
               .beta1 = static_cast<float>(config_.beta1),
               .beta2 = static_cast<float>(config_.beta2),
               .eps = static_cast<float>(config_.adam_eps),
               .weight_decay = static_cast<float>(config_.weight_decay),
               .step = made.indexers,
               .sum_of_squares = sum_of_squares_.f32(),
               .clip_norm = static_cast<float>(config_.clip_norm)};
  if (made.model == made.indexers) return {{update, std::nullopt}};
  std::vector<StateStream::Update> each = {{update, Part::kIndexer}};
  update.step = made.model;
  if (made.model > 0) each.push_back({update, Part::kModel});
  return each;
}

void Optimizer::clear_gradients() {
  for (const auto& group : groups_) {
    if (!to_clear_.contains(group.get())) group->clear_gradients(session_);
  }
}

void Optimizer::last_walk(const StepsMade& made) {
  if (!early_.empty()) in_walk_ = updates(made);
}

void Optimizer::before_use(ParameterGroup& group) {
  if (state_ == nullptr || !state_->settle(group)) return;
  to_clear_.erase(&group);
  group.clear_gradients(session_);
}

void Optimizer::after_gradients(ParameterGroup& group) {
  if (in_walk_.empty() || !early_.contains(&group)) return;
  state_->step(group, in_walk_);
  stepped_.insert(&group);
}

void Optimizer::step(Ops& ops, const StepsMade& made) {
  const Stream stream = session_.compute();
  if (clips()) {
    require(session_.device().fill(stream, sum_of_squares_.block->address, 0, sum_of_squares_.bytes()));
    for (const auto& group : groups_) group->add_sum_of_squares(ops, stream, sum_of_squares_.f32());
  }
  // Those that are fetched ahead of their group's step come with their gradients.
  for (const auto& group : groups_) {
    if (state_ != nullptr && !stepped_.contains(group.get())) state_->gradients_are_final(*group);
  }
  const std::vector<StateStream::Update> all = updates(made);
  for (const auto& group : groups_) {
    if (group->streamed_count() > 0) {
      if (!stepped_.contains(group.get())) state_->step(*group, all);
      to_clear_.insert(group.get());
      continue;
    }
    for (const StateStream::Update& update : all) group->step(ops, stream, update.how, update.only);
    step_matrices(ops, *group, made);
  }
  in_walk_.clear();
  stepped_.clear();
}

void Optimizer::settle() {
  for (const auto& group : groups_) before_use(*group);
}

void Optimizer::drain() const {
  if (state_ != nullptr) state_->drain();
}

}  // namespace terrace::trainer
