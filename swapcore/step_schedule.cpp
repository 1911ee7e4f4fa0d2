#include "swapcore/step_schedule.hpp"

#include <algorithm>

namespace terrace {
namespace {

constexpr std::size_t kMostPlaces = std::size_t{1} << 20;

bool alike(Bytes a, Bytes b) { return std::max(a, b) - std::min(a, b) <= Bytes(std::max(a, b).count() / 8); }

}  // namespace

void StepSchedule::begin() {
  now_.clear();
  passes_.clear();
  batches_ = 0;
  deviated_ = overflown_ = backward_ = false;
}

std::optional<Deviation> StepSchedule::difference(const Place& place) const {
  if (place.micro_batch >= learned_batches_) return Deviation::kMicroBatches;
  if (now_.size() >= learned_.size()) return Deviation::kLayerOrder;
  const Place& then = learned_[now_.size()];
  const bool same = place.offers == then.offers && place.pass == then.pass && place.which == then.which &&
                    place.micro_batch == then.micro_batch;
  if (!same) return Deviation::kLayerOrder;
  return alike(place.bytes, then.bytes) ? std::nullopt : std::optional(Deviation::kShape);
}

std::optional<Deviation> StepSchedule::note(const Place& place) {
  std::optional<Deviation> deviation;
  if (!learned_.empty() && !deviated_) deviation = difference(place);
  deviated_ = deviated_ || deviation;
  batches_ = std::max(batches_, place.micro_batch + 1);
  if (now_.size() < kMostPlaces) {
    now_.push_back(place);
  } else {
    overflown_ = true;
  }
  return deviation;
}

std::optional<Deviation> StepSchedule::enter(Pass pass, int layer, std::uint32_t micro_batch) {
  if (pass == Pass::kForward) ++passes_[{layer, micro_batch}];
  if (pass == Pass::kBackward) {
    --passes_[{layer, micro_batch}];
    backward_ = true;
  }
  return note({.pass = pass, .which = layer, .micro_batch = micro_batch});
}

std::optional<Deviation> StepSchedule::offer(std::uint32_t site, std::uint32_t micro_batch, Bytes bytes) {
  return note({.offers = true, .which = site, .micro_batch = micro_batch, .bytes = bytes});
}

std::optional<Deviation> StepSchedule::end() {
  if (learned_.empty() || deviated_ || now_.size() == learned_.size()) return std::nullopt;
  deviated_ = true;
  if (!complete()) return Deviation::kWithoutBackward;
  return batches_ < learned_batches_ ? Deviation::kMicroBatches : Deviation::kLayerOrder;
}

bool StepSchedule::complete() const {
  return backward_ && !overflown_ &&
         std::all_of(passes_.begin(), passes_.end(), [](const auto& pass) { return pass.second == 0; });
}

void StepSchedule::learn() {
  learned_ = now_;
  learned_batches_ = batches_;
  deviated_ = false;
}

void StepSchedule::forget() {
  learned_.clear();
  learned_batches_ = 0;
}

}  // namespace terrace
