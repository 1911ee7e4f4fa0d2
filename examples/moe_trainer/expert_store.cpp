#include "examples/moe_trainer/expert_store.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "examples/moe_trainer/failure.hpp"

namespace terrace::trainer {

// A layer stays where the share of all that lies up to it has room for it beside those that stay before it.
std::vector<StateTier> ExpertStore::spread(std::span<const Bytes> layers, Bytes resident) {
  const double all = static_cast<double>(std::accumulate(layers.begin(), layers.end(), 0_B).count());
  const double limit = std::min(all, static_cast<double>(resident.count()));
  std::vector<StateTier> tiers;
  double seen = 0, staying = 0;
  for (const Bytes layer : layers) {
    const auto bytes = static_cast<double>(layer.count());
    seen += bytes;
    const bool stays = limit == all || staying + bytes <= limit * (seen / all) * (1 + 1e-12);
    if (stays) staying += bytes;
    tiers.push_back(stays ? StateTier::kHbm : StateTier::kDdr);
  }
  return tiers;
}

ExpertStore::ExpertStore(Session& session, std::vector<ParameterGroup*> groups, int prefetch)
    : session_(session), groups_(std::move(groups)), ahead_(static_cast<std::size_t>(prefetch)) {
  Bytes largest;
  for (const ParameterGroup* group : groups_) largest = std::max(largest, group->expert_home()->size);
  ring_ = require(session.open_ring({.slot = largest,
                                     .slots = static_cast<int>(std::min(ahead_ + 1, groups_.size())),
                                     .pool = Pool::kExpert,
                                     .user = session.compute(),
                                     .reason = CopyReason::kExpert}));
  renewed_ = require(session.device().create_event());
  for (ParameterGroup* group : groups_) {
    const Block& home = *group->expert_home();
    items_.push_back(ring_->add({{home.address, home.size, SlotRing::Flow::kIn}}));
    group->expert_store = this;
  }
}

ExpertStore::~ExpertStore() {
  for (ParameterGroup* group : groups_) group->expert_store = nullptr;
  ring_.reset();
  session_.device().destroy_event(renewed_);
}

std::size_t ExpertStore::place_of(const ParameterGroup& group) const {
  return static_cast<std::size_t>(std::find(groups_.begin(), groups_.end(), &group) - groups_.begin());
}

// What is used from a place on: so many layers that way, and back again where the way ends.
std::vector<SlotRing::ItemId> ExpertStore::from(std::size_t place, Way way) const {
  const auto last = static_cast<std::ptrdiff_t>(items_.size()) - 1;
  std::ptrdiff_t step = way == Way::kForward ? 1 : -1;
  auto at = static_cast<std::ptrdiff_t>(place);
  std::vector<SlotRing::ItemId> next = {items_[place]};
  while (next.size() < std::min(ahead_ + 1, items_.size())) {
    if (at + step < 0 || at + step > last) {
      step = -step;
      at = static_cast<std::ptrdiff_t>(place);  // those passed on the way here come first again
      if (at + step < 0 || at + step > last) break;
    }
    at += step;
    const SlotRing::ItemId item = items_[static_cast<std::size_t>(at)];
    if (std::find(next.begin(), next.end(), item) == next.end()) next.push_back(item);
  }
  return next;
}

void ExpertStore::acquire(const ParameterGroup& group, Way way) {
  require(failed_);
  const std::size_t place = place_of(group);
  const std::vector<SlotRing::ItemId> next = from(place, way);
  groups_[place]->place_experts(require(ring_->acquire(next.front())).front());
  require(ring_->expect(next));
  session_.count_stall(StallReason::kExpertLate, ring_->collect_waits());
}

void ExpertStore::release(const ParameterGroup& group) noexcept {
  const std::size_t place = place_of(group);
  groups_[place]->place_experts(nullptr);
  Status released = ring_->release(items_[place], SlotRing::Use::kRead);
  if (failed_) failed_ = std::move(released);
}

void ExpertStore::renew() {
  require(session_.device().record(session_.compute(), renewed_));
  for (const SlotRing::ItemId item : items_) ring_->renew_behind(item, renewed_);
}

// What the next step begins with is on its way at once.
void ExpertStore::renew_behind(const ParameterGroup& group, Event event) {
  const std::size_t place = place_of(group);
  ring_->renew_behind(items_[place], event);
  if (place <= ahead_) require(ring_->expect({&items_[place], 1}));
}

void ExpertStore::drain() {
  require(ring_->drain());
  for (const SlotRing::ItemId item : items_) require(ring_->forget(item));
}

}  // namespace terrace::trainer
