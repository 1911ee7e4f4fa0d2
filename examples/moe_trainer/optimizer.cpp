#include "examples/moe_trainer/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {
namespace {

// Shares of the numbers whose state lives in DDR. The first third is asked for first: a forward pass is a
// third of a step. The first gradients must keep the link busy until the next, which takes a small part of
// what they take there. And the link has what is kept for the end while forward runs through all but the
// first third.
constexpr std::int64_t kAskedFirst = 3, kMadeFirst = 32, kKept = 24;

}  // namespace

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

std::vector<std::size_t> update_order(std::span<const std::int64_t> numbers) {
  const std::int64_t total = std::accumulate(numbers.begin(), numbers.end(), std::int64_t{0});
  // The first group from which on there are at most so many numbers up to `end`; 0 where all are fewer.
  const auto tail = [&](std::size_t end, std::int64_t least) {
    std::int64_t sum = 0;
    while (end > 0 && sum < least) sum += numbers[--end];
    return end;
  };
  std::size_t within = 0;
  for (std::int64_t before = 0; within < numbers.size() && before < total / kAskedFirst; ++within)
    before += numbers[within];
  const std::size_t made_first = std::max(within, tail(numbers.size(), total / kMadeFirst));
  std::size_t kept = tail(made_first, total / kKept);
  if (kept <= within) kept = made_first;  // too few to choose from
  std::vector<std::size_t> order;
  for (std::size_t i = numbers.size(); i-- > made_first;) order.push_back(i);
  for (std::size_t i = kept; i-- > within;) order.push_back(i);
  for (std::size_t i = 0; i < within; ++i) order.push_back(i);
  for (std::size_t i = kept; i < made_first; ++i) order.push_back(i);
  return order;
}

Optimizer::Optimizer(const TrainConfig& config, Memory& memory, const ParameterGroups& groups)
    : config_(config),
      memory_(memory),
      session_(memory.session()),
      groups_(groups),
      sum_of_squares_(memory.tensor(1, 1, Pool::kOptimizer)),
      in_order_(order()),
      state_(StateStream::of(session_, {in_order_.begin(), in_order_.end()})) {}

std::vector<ParameterGroup*> Optimizer::order() const {
  std::vector<ParameterGroup*> all, ordered;
  std::vector<std::int64_t> numbers;
  for (const auto& group : groups_) {
    if (group->streamed_count() == 0) continue;
    all.push_back(group.get());
    numbers.push_back(group->streamed_count());
  }
  if (clips()) return all;
  for (const std::size_t i : update_order(numbers)) ordered.push_back(all[i]);
  return ordered;
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

void Optimizer::last_walk() { in_last_walk_ = true; }

void Optimizer::before_use(ParameterGroup& group) {
  if (state_ == nullptr || !state_->settle(group)) return;
  to_clear_.erase(&group);
  group.clear_gradients(session_);
}

void Optimizer::after_gradients(ParameterGroup& group) {
  if (state_ != nullptr && in_last_walk_ && !clips()) state_->gradients_made(group);
}

void Optimizer::step(Ops& ops, const StepsMade& made) {
  in_last_walk_ = false;
  const Stream stream = session_.compute();
  if (clips()) {
    require(session_.device().fill(stream, sum_of_squares_.block->address, 0, sum_of_squares_.bytes()));
    for (const auto& group : groups_) group->add_sum_of_squares(ops, stream, sum_of_squares_.f32());
  }
  // Those that are fetched ahead of their group's step come with their gradients.
  for (const ParameterGroup* group : in_order_) state_->gradients_are_final(*group);
  const std::vector<StateStream::Update> all = updates(made);
  for (ParameterGroup* const group : in_order_) {
    state_->step(*group, all);
    to_clear_.insert(group);
  }
  for (const auto& group : groups_) {
    if (group->streamed_count() > 0) continue;
    for (const StateStream::Update& update : all) group->step(ops, stream, update.how, update.only);
    step_matrices(ops, *group, made);
  }
}

void Optimizer::settle() {
  for (const auto& group : groups_) before_use(*group);
}

void Optimizer::drain() const {
  if (state_ != nullptr) state_->drain();
}

}  // namespace terrace::trainer
