// AdamW with decoupled decay of matrices, clipping by the global norm, linear warm-up and cosine decay; or
// Muon for the matrices of layers and AdamW for the rest. Muon's update has one size whatever that of the
// gradient, so that clipping is of AdamW's.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "examples/moe_trainer/config.hpp"
#include "examples/moe_trainer/model/group_keeper.hpp"
#include "examples/moe_trainer/state_stream.hpp"

namespace terrace::trainer {

// Of step 1, 2, ...: rises linearly over warmup_steps, then falls along a half cosine to final_learning_rate
// at schedule_steps, and stays there.
[[nodiscard]] double learning_rate_at(const TrainConfig& config, std::int64_t step);

// Without clipping, of groups with so many numbers in the order of forward: the order in which they are
// stepped. Nothing can be stepped from when the next forward has reached the last of them until backward has
// made its first gradients. That is to be short: what comes last is asked for late in forward, and is not
// what backward makes first.
[[nodiscard]] std::vector<std::size_t> update_order(std::span<const std::int64_t> numbers);

// How many steps each part of a model has made, this one included. The model has made none while its indexers
// warm up.
struct StepsMade {
  std::int64_t model = 0, indexers = 0;
};

// Groups whose state is in HBM are stepped on the compute stream at the step's end. Where it lives in DDR the
// update runs beside compute, and each group's ends when the next walk reaches it, where its gradients are
// cleared. With clipping all begin at the step's end, in the order in which the next walk asks for them.
// Without, they begin as the walk makes their gradients, and all are handed to the device behind the walk:
// that has more to do then than the host needs for it. docs/design/0012-streamed-weights.md says in which
// order.
class Optimizer final : public GroupKeeper {
 public:
  // Memory, session and groups outlive it. Throws OutOfMemory.
  Optimizer(const TrainConfig& config, Memory& memory, const ParameterGroups& groups);
  void clear_gradients();
  // The walk that follows is the last of its step.
  void last_walk();
  // Steps every group by its gradients. The schedule is the model's; indexers that warm up go at the full
  // rate.
  void step(Ops& ops, const StepsMade& made);
  // Later work of the compute stream finds all groups as stepped.
  void settle();
  // After settle(): the host waits until state outside of HBM is current, and may write it.
  void drain() const;

  // Null where all state is in HBM.
  [[nodiscard]] const StateStream* state() const { return state_.get(); }

  void before_use(ParameterGroup& group) override;
  void after_gradients(ParameterGroup& group) override;

 private:
  [[nodiscard]] std::vector<StateStream::Update> updates(const StepsMade& made) const;
  [[nodiscard]] double rate(const StepsMade& made) const;
  void step_matrices(Ops& ops, const ParameterGroup& group, const StepsMade& made) const;
  [[nodiscard]] std::vector<ParameterGroup*> order() const;
  [[nodiscard]] bool clips() const { return config_.clip_norm > 0; }

  const TrainConfig& config_;
  Memory& memory_;
  Session& session_;
  const ParameterGroups& groups_;
  Tensor sum_of_squares_;
  bool in_last_walk_ = false;                 // of a step
  std::vector<ParameterGroup*> in_order_;     // whose state lives in DDR, as they are stepped
  std::set<const ParameterGroup*> to_clear_;  // gradients of the step before, when its update is over
  std::unique_ptr<StateStream> state_;        // null: all of it is in HBM
};

}  // namespace terrace::trainer
