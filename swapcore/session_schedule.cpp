// A step as the session expects it, and what it does where one goes another way; how much of the link it
// used.
#include <utility>

#include "runtime/metrics.hpp"
#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {

Status Session::Impl::open_clock() {
  if (RunTimeline* timeline = spans.timeline()) {
    clock = &timeline->clock();
  } else if (caching()) {
    auto made = DeviceClock::create(device, compute);
    if (!made) return made.error();
    own_clock = std::move(made).value();
    clock = own_clock.get();
  }
  if (caching()) link_use = std::make_unique<LinkUse>(device, compute, *clock);
  return {};
}

// On any thread, under the copy engine's lock.
void Session::Impl::note_move(const CopyMove& move) {
  const auto start = clock->at(move.begun);
  const auto end = clock->at(move.arrived);
  if (!start || !end) return;
  if (link_use != nullptr) link_use->moved(move.direction, move.bytes, *start, *end);
  if (RunTimeline* timeline = spans.timeline())
    timeline->moved({move.direction, move.reason, move.bytes, *start, *end}, move.label);
}

std::string Session::Impl::label_of(const EntryKey& key) const {
  if (key.what == EntryKey::What::kOutput) return sites[key.index].name;
  return "layer." + std::to_string(key.layer) + " saved " + std::to_string(key.index);
}

RunTimeline::Levels Session::Impl::levels() const { return {hbm->usage().live, ddr->usage().live}; }

void Session::Impl::begin_schedule() {
  awaited.clear();
  schedule.begin();
  window_phase = StepProfile::Phase::kBegin;
  link_use_due = false;
  if (link_use != nullptr) link_use->begin();
  if (clock != nullptr) clock->move_anchor(compute);
}

void Session::Impl::end_schedule() {
  if (!caching()) return;
  note_deviation(schedule.end());
  if (window_phase == StepProfile::Phase::kBackward && plan) link_use->mark(LinkUse::Moment::kEnd);
  const bool complete = schedule.complete();
  if (complete) ++complete_steps;
  link_use_due = plan && !schedule.deviated();
  if (!schedule.deviated()) return;
  step_events.pending = false;  // its time is no measure of the plan
  missed_room = 0_B;
  if (complete) drift.add_deviated();
}

void Session::Impl::note_deviation(std::optional<Deviation> deviation) {
  if (!deviation) return;
  switch (*deviation) {
    case Deviation::kLayerOrder:
      return count_fallback(FallbackReason::kLayerOrder);
    case Deviation::kMicroBatches:
      return count_fallback(FallbackReason::kMicroBatches);
    case Deviation::kShape:
      return count_fallback(FallbackReason::kChangedShape);
    case Deviation::kWithoutBackward:
      return count_fallback(FallbackReason::kWithoutBackward);
  }
}

bool Session::Impl::offered_again(const EntryKey& entry) {
  Awaited& known = awaited[entry];
  if (++known.offers > 1) known.several = true;
  return known.several;
}

// Asked once for each offer: the last of them ends the doubt.
bool Session::Impl::offered_several_times(const EntryKey& entry) {
  const auto found = awaited.find(entry);
  if (found == awaited.end()) return false;
  const bool several = found->second.several;
  if (--found->second.offers == 0) awaited.erase(found);
  return several;
}

void Session::Impl::count_fallback(FallbackReason reason) {
  ++counters.fallbacks[static_cast<std::size_t>(reason)];
  metrics().add<Metric::kFallbacks>(reason, 1);
  if (RunTimeline* timeline = spans.timeline()) timeline->note("fallback", name_of(reason));
}

void Session::Impl::mark_window(StepProfile::Phase phase, int layer) {
  if (!plan) return;
  const StepProfile::Phase before = std::exchange(window_phase, phase);
  if (phase == StepProfile::Phase::kForward && before != phase) {
    if (before == StepProfile::Phase::kBackward) link_use->mark(LinkUse::Moment::kEnd);
    link_use->mark(LinkUse::Moment::kBegin);
  }
  if (phase == StepProfile::Phase::kHead) link_use->mark(LinkUse::Moment::kHead);
  if (phase == StepProfile::Phase::kBackward && layer == 0) link_use->mark(LinkUse::Moment::kFirstLayer);
}

// Of the last step, once its work has completed.
void Session::Impl::measure_link_use() {
  if (!link_use_due || !measured) return;
  store->poll();
  const auto ways = link_use->measure(measured->h2d_bytes_per_second, measured->d2h_bytes_per_second);
  if (!ways) return;
  link_use_due = false;
  for (const Direction direction : {Direction::kH2D, Direction::kD2H}) {
    const LinkUse::Way& way = (*ways)[static_cast<std::size_t>(direction)];
    LinkUse::Way& sum = counters.link_windows[static_cast<std::size_t>(direction)];
    sum = {sum.moved + way.moved, sum.capacity + way.capacity};
    metrics().add<Metric::kLinkWindowBytes>(direction, way.moved);
    metrics().add<Metric::kLinkWindowCapacity>(direction, way.capacity);
  }
}

void Session::cancel_step() {
  Impl& self = *impl_;
  if (!self.running) return;
  self.running = false;
  self.forget_step();
  self.count_fallback(FallbackReason::kStepCancelled);
  self.spans.end_step();
  self.publish_usage();
}

void Session::Impl::forget_step() {
  store->poll();
  store->drop_all(EntryKey::What::kOutput);
  store->drop_all(EntryKey::What::kSaved);
  // What copies that nobody wants any more still hold.
  for (auto freed = store->wait_for_a_spill(); freed && *freed;) freed = store->wait_for_a_spill();
  if (packer) packer->forget_all();
  profile.reset();
  awaited.clear();
  schedule.begin();
  step_events.pending = false;
  missed_room = 0_B;
  link_use_due = false;
}

}  // namespace terrace
