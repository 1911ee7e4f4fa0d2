#include "examples/moe_trainer/expert_gradients.hpp"

#include <algorithm>
#include <utility>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

namespace {
constexpr std::size_t kSlots = 2;  // one is added to, one leaves or arrives
}

ExpertGradients::ExpertGradients(Session& session, std::vector<ParameterGroup*> groups) : session_(session) {
  Bytes largest;
  for (const ParameterGroup* group : groups) largest = std::max(largest, group->expert_gradient_home()->size);
  ring_ = require(session.open_ring({.slot = largest,
                                     .slots = static_cast<int>(std::min(kSlots, groups.size())),
                                     .pool = Pool::kGradient,
                                     .user = session.compute(),
                                     .reason = CopyReason::kOptimizer}));
  for (ParameterGroup* group : groups) {
    const Block& home = *group->expert_gradient_home();
    layers_.push_back({.group = group, .item = ring_->add({{home.address, home.size}})});
    group->expert_gradients = this;
  }
}

ExpertGradients::~ExpertGradients() {
  for (const Layer& layer : layers_) layer.group->expert_gradients = nullptr;
}

std::size_t ExpertGradients::place_of(const ParameterGroup& group) const {
  const auto found = std::find_if(layers_.begin(), layers_.end(),
                                  [&group](const Layer& layer) { return layer.group == &group; });
  return static_cast<std::size_t>(found - layers_.begin());
}

void ExpertGradients::clear(const ParameterGroup& group) { layer_of(group).zeros = true; }

bool ExpertGradients::are_zeros(const ParameterGroup& group) const { return layers_[place_of(group)].zeros; }

void ExpertGradients::acquire(const ParameterGroup& group, For use) {
  require(failed_);
  const std::size_t place = place_of(group);
  Layer& layer = layers_[place];
  const bool begins = std::exchange(layer.zeros, false);
  TERRACE_CHECK(!begins || use == For::kAdding, "zeros are not read");
  const Address at =
      require(ring_->acquire(layer.item, begins ? SlotRing::Fill::kNothing : SlotRing::Fill::kFromHome))
          .front();
  layer.group->place_expert_gradients(reinterpret_cast<float*>(at));
  if (begins) {
    const Bytes size = layer.group->expert_gradient_home()->size;
    require(session_.device().fill(session_.compute(), at, 0, size));
  }
  const std::size_t next = use == For::kAdding ? place - 1 : place + 1;  // past the end: none
  if (next < layers_.size() && !layers_[next].zeros) {
    const SlotRing::ItemId items[] = {layer.item, layers_[next].item};
    require(ring_->expect(items));
  }
  session_.count_stall(StallReason::kOptimizerLate, ring_->collect_waits());
}

void ExpertGradients::release(const ParameterGroup& group, For use) noexcept {
  Layer& layer = layer_of(group);
  layer.group->place_expert_gradients(nullptr);
  Status released =
      ring_->release(layer.item, use == For::kAdding ? SlotRing::Use::kWritten : SlotRing::Use::kRead);
  if (failed_) failed_ = std::move(released);
}

void ExpertGradients::order_behind_write(Stream stream, const ParameterGroup& group) {
  require(failed_);
  require(ring_->order_behind_write(stream, layer_of(group).item));
}

}  // namespace terrace::trainer
