// Experts in DDR: what products read of a layer's experts comes to HBM while the layer needs it.
//
// Layers run in order and in backward in reverse, so what comes next is known: while one layer computes, the
// next ones' experts are on their way. Where the order turns round, at the last layer and at the first, a
// slot still holds what is needed. What an evaluation does out of order is only slower.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "examples/moe_trainer/parameters.hpp"

namespace terrace::trainer {

class ExpertStore {
 public:
  enum class Way : std::uint8_t { kForward, kBackward };
  // Which of these layers keep their experts in HBM: evenly spread, together at most the share. A layer takes
  // part with the bytes of its experts, 0 where it has none.
  [[nodiscard]] static std::vector<StateTier> spread(std::span<const Bytes> layers, Bytes resident);

  // Of the groups whose experts live in DDR, in order of layers; at least one. Throws OutOfMemory, Failure.
  ExpertStore(Session& session, std::vector<ParameterGroup*> groups, int prefetch);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  // The group's experts are in HBM between the two, in order of the compute stream, and their pointers set.
  void acquire(const ParameterGroup& group, Way way);
  void release(const ParameterGroup& group) noexcept;  // what fails is thrown by the next acquire()
  // The compute stream writes homes: whoever fetches them next waits for what it has to do now.
  void renew();
  // Another stream writes the group's: whoever fetches them next waits for the event.
  void renew_behind(const ParameterGroup& group, Event event);
  // The host waits until no copy reads the homes: it may write them.
  void drain();
  [[nodiscard]] const SlotRing::Counters& counters() const { return ring_->counters(); }

 private:
  [[nodiscard]] std::size_t place_of(const ParameterGroup& group) const;
  [[nodiscard]] std::vector<SlotRing::ItemId> from(std::size_t place, Way way) const;

  Session& session_;
  std::vector<ParameterGroup*> groups_;
  std::vector<SlotRing::ItemId> items_;
  std::size_t ahead_;  // layers
  Status failed_;
  Event renewed_{};
  std::unique_ptr<SlotRing> ring_;
};

// Experts of a group for as long as this lives; nothing to do where they stay in HBM.
class ExpertUse {
 public:
  ExpertUse(const ParameterGroup& group, ExpertStore::Way way) : group_(group) {
    if (group.expert_store != nullptr) group.expert_store->acquire(group, way);
  }
  ~ExpertUse() {
    if (group_.expert_store != nullptr) group_.expert_store->release(group_);
  }
  ExpertUse(const ExpertUse&) = delete;
  ExpertUse& operator=(const ExpertUse&) = delete;

 private:
  const ParameterGroup& group_;
};

}  // namespace terrace::trainer
