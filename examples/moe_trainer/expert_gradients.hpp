// Gradients of trained experts in DDR: a layer's come to HBM while they are added to or read.
//
// The first micro-batch of a step adds to zeros in a slot, later ones to what comes back from DDR: the same
// sums in the same order as in HBM. Backward goes through layers in reverse, the norm in order: what comes
// next is fetched ahead. The update reads its share of them itself, chunk by chunk (state_stream.hpp).
#pragma once

#include <memory>
#include <vector>

#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

class ExpertGradients {
 public:
  enum class For : std::uint8_t { kAdding, kReading };
  // Of the groups whose gradients of experts live in DDR, in order of layers; at least one. Throws
  // OutOfMemory, Failure.
  ExpertGradients(Session& session, std::vector<ParameterGroup*> groups);
  ~ExpertGradients();
  ExpertGradients(const ExpertGradients&) = delete;
  ExpertGradients& operator=(const ExpertGradients&) = delete;

  // The group's are zeros until something is added.
  void clear(const ParameterGroup& group);
  [[nodiscard]] bool are_zeros(const ParameterGroup& group) const;
  // In HBM between the two, in order of the compute stream, and the parameters' pointers set. Precondition of
  // kReading: not zeros.
  void acquire(const ParameterGroup& group, For use);
  void release(const ParameterGroup& group, For use) noexcept;  // what fails is thrown by the next call
  // Later work on `stream` finds in DDR what has been added so far.
  void order_behind_write(Stream stream, const ParameterGroup& group);

  [[nodiscard]] const SlotRing::Counters& counters() const { return ring_->counters(); }

 private:
  struct Layer {
    ParameterGroup* group = nullptr;
    SlotRing::ItemId item;
    bool zeros = true;
  };
  [[nodiscard]] std::size_t place_of(const ParameterGroup& group) const;
  [[nodiscard]] Layer& layer_of(const ParameterGroup& group) { return layers_[place_of(group)]; }

  Session& session_;
  std::vector<Layer> layers_;
  Status failed_;
  std::unique_ptr<SlotRing> ring_;
};

// A group's gradients of experts for as long as this lives; nothing to do where they stay in HBM.
class ExpertGradientUse {
 public:
  ExpertGradientUse(const ParameterGroup& group, ExpertGradients::For use) : group_(group), use_(use) {
    if (group.expert_gradients != nullptr) group.expert_gradients->acquire(group, use);
  }
  ~ExpertGradientUse() {
    if (group_.expert_gradients != nullptr) group_.expert_gradients->release(group_, use_);
  }
  ExpertGradientUse(const ExpertGradientUse&) = delete;
  ExpertGradientUse& operator=(const ExpertGradientUse&) = delete;

 private:
  const ParameterGroup& group_;
  ExpertGradients::For use_;
};

}  // namespace terrace::trainer
