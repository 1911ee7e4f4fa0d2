// A step as the session sees it: what is kept, what is asked for again, when what left comes back.
#include <algorithm>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {
RuleAction Session::Impl::rule_for(SiteId site, RulePhase phase) const {
  return decide(policy.swapcore.rules, sites[site.index], phase, step);
}

// Until there is a plan every output is computed again, unless a rule names its place.
Placement Session::Impl::placement(SiteId site) const {
  switch (rule_for(site, RulePhase::kForward)) {
    case RuleAction::kHbm:
      return Placement::kHbm;
    case RuleAction::kDdr:
      return Placement::kDdr;
    case RuleAction::kDiscard:
      return Placement::kRecompute;
    case RuleAction::kAuto:
      break;
  }
  if (!plan) return Placement::kRecompute;
  // A step that goes another way has other windows: what travels in them might be waited for.
  const Placement planned = plan->placements[site.index];
  return planned == Placement::kDdr && schedule.deviated() ? Placement::kRecompute : planned;
}

void Session::begin_step() {
  Impl& self = *impl_;
  cancel_step();
  self.follow_daemon();
  self.step_started = seconds_of(steady_clock().now());
  // What was saved outside of a step is nobody's any more.
  self.store->drop_all(EntryKey::What::kSaved);
  if (self.caching() && !self.plan && self.complete_steps >= self.measure_from)
    self.start_measuring("the first steps");
  self.learn_from_the_last_step();
  if (self.packer) (void)self.packer->error();
  if (self.rules_change() && !self.profile) self.make_plan();
  self.running = true;
  self.begin_schedule();
  self.hbm->take_watermark();
  self.fullest_hbm = self.fullest_ddr = {};
  if (self.spans.watched()) self.spans.step(self.step, self.levels());
  if (self.profile) self.profile->enter(StepProfile::Phase::kBegin, 0, 0_B);
  self.begin_timing();
}

namespace {
std::string name_of_position(StepProfile::Phase phase, int layer, std::uint32_t micro_batch) {
  std::string name = phase == StepProfile::Phase::kHead ? "head" : "layer " + std::to_string(layer);
  if (phase == StepProfile::Phase::kForward) name += " forward";
  if (phase == StepProfile::Phase::kBackward) name += " backward";
  return micro_batch == 0 ? name : name + ", micro-batch " + std::to_string(micro_batch);
}

StepSchedule::Pass pass_of(StepProfile::Phase phase) {
  return phase == StepProfile::Phase::kForward ? StepSchedule::Pass::kForward
         : phase == StepProfile::Phase::kHead  ? StepSchedule::Pass::kHead
                                               : StepSchedule::Pass::kBackward;
}
}  // namespace

void Session::Impl::enter(StepProfile::Phase phase, int layer, std::uint32_t micro_batch) {
  store->poll();
  if (asked.load(std::memory_order_relaxed)) give_way();
  if (spans.watched()) spans.position(name_of_position(phase, layer, micro_batch), levels());
  if (profile) profile->enter(phase, layer, take_peak());
  publish_usage();
  if (!running || !caching()) return;
  mark_window(phase, layer);
  note_deviation(schedule.enter(pass_of(phase), layer, micro_batch));
}

void Session::enter_forward(int layer, std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kForward, layer, micro_batch);
  impl_->depart_planned(static_cast<std::size_t>(layer), micro_batch);
}

void Session::enter_head(std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kHead, 0, micro_batch);
  impl_->step_events.ddr_peak =
      std::max(impl_->step_events.ddr_peak, impl_->store->ddr_bytes(EntryKey::What::kOutput));
  impl_->ddr_needed =
      std::max(impl_->ddr_needed,
               saturating_sub(impl_->ddr->usage().live, impl_->store->ddr_bytes(EntryKey::What::kOutput)));
  const std::size_t layers = impl_->layer_sites.size();
  impl_->depart_planned(layers, micro_batch);
  impl_->restore_layer(static_cast<int>(layers) - 1, micro_batch);
  impl_->restore_planned(layers, micro_batch);
}

void Session::enter_backward(int layer, std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kBackward, layer, micro_batch);
  const std::size_t moment = 2 * impl_->layer_sites.size() - static_cast<std::size_t>(layer);
  impl_->depart_planned(moment, micro_batch);
  impl_->restore_layer(layer - 1, micro_batch);
  impl_->restore_planned(moment, micro_batch);
}

// What has left by this moment, as planned, holds no HBM from here on. What the store refuses it settles when
// the copy is seen to have ended.
void Session::Impl::depart_planned(std::size_t moment, std::uint32_t micro_batch) {
  if (!plan || moment >= plan->departures.size() || schedule.deviated()) return;
  for (const SiteKey& key : plan->departures[moment])
    (void)store->depart(entry_of({key.site, micro_batch}, sites[key.site.index].layer));
}

void Session::enter_update() {
  if (impl_->profile) impl_->profile->enter(StepProfile::Phase::kUpdate, 0, impl_->take_peak());
  if (impl_->spans.watched()) impl_->spans.position("update", impl_->levels());
}

// Starts bringing back what the layer will ask for and the plan does not time, in the order in which it will.
// What finds no room stays in DDR.
void Session::Impl::restore_layer(int layer, std::uint32_t micro_batch) {
  if (layer < 0) return;
  for (const EntryKey& key : store->in_layer(layer, micro_batch)) {
    const bool planned =
        plan && key.what == EntryKey::What::kOutput && plan->placements[key.index] == Placement::kDdr;
    if (!planned && !store->restore(key)) return;
  }
}

// The same for what the plan brings back from this moment on.
void Session::Impl::restore_planned(std::size_t moment, std::uint32_t micro_batch) {
  if (!plan || moment >= plan->restores.size() || schedule.deviated()) return;
  for (const SiteKey& of_any : plan->restores[moment]) {
    const EntryKey key = entry_of({of_any.site, micro_batch}, sites[of_any.site.index].layer);
    if (store->state(key) && !store->restore(key)) return;
  }
}

namespace {
FallbackReason reason_of(Errc refused) {
  const bool full = refused == Errc::kOutOfBudget || refused == Errc::kOutOfMemory;
  return full ? FallbackReason::kHbmFull : FallbackReason::kCopyFailed;
}
}  // namespace

// The output itself or, where it is to travel in another format, that.
Result<BlockRef> Session::Impl::to_keep(const EntryKey& entry, const BlockRef& output, Placement placement,
                                        Element element) {
  const SpillFormat format = policy.swapcore.spill_format;
  if (placement != Placement::kDdr || travel_bytes(format, output->size, element) == output->size)
    return output;
  return packer->pack(entry, *output, element, [this](const Block& block) { return wrap(block); });
}

void Session::offer(const SiteKey& key, const BlockRef& output, Element element) {
  Impl& self = *impl_;
  if (!self.caching() || !self.running) return;
  TERRACE_CHECK(key.site.index < self.sites.size(), "a site is declared before it is offered");
  const Bytes whole = output->size;
  const Bytes packed = travel_bytes(self.policy.swapcore.spill_format, whole, element);
  if (self.profile) self.profile->add_output(key.site, {whole, packed});
  self.note_deviation(self.schedule.offer(key.site.index, key.micro_batch, whole));
  const EntryKey entry = entry_of(key, self.sites[key.site.index].layer);
  if (self.offered_again(entry)) {
    self.store->drop(entry);
    return self.count_fallback(FallbackReason::kOfferedTwice);
  }
  const Placement placement = self.placement(key.site);
  if (placement == Placement::kRecompute) return;
  // What travels is in HBM only on its way: its limit is DDR's.
  const bool travels = placement == Placement::kDdr;
  const Bytes size = travels ? packed : whole;
  if (self.store->hbm_bytes() + size > self.budgets.checkpoint)
    return self.count_fallback(FallbackReason::kHbmFull);
  const Bytes held = travels ? self.store->ddr_bytes(EntryKey::What::kOutput)
                             : self.store->hbm_bytes(EntryKey::What::kOutput);
  if (held + size > (travels ? self.budgets.swapcore_ddr : self.budgets.swapcore_hbm))
    return self.count_fallback(travels ? FallbackReason::kDdrFull : FallbackReason::kHbmFull);
  auto kept = self.to_keep(entry, output, placement, element);
  if (!kept) return self.count_fallback(reason_of(kept.error().code));
  self.store->keep(entry, std::move(kept).value());
  if (!travels) return;
  const auto spilled = self.store->spill(entry);
  if (spilled) return;
  self.store->drop(entry);
  const Errc code = spilled.error().code;
  const bool full = code == Errc::kOutOfBudget || code == Errc::kOutOfMemory;
  self.count_fallback(full ? FallbackReason::kDdrFull : FallbackReason::kCopyFailed);
}

void Session::changed(const SiteKey& key) {
  Impl& self = *impl_;
  TERRACE_CHECK(key.site.index < self.sites.size(), "a site is declared before it is named");
  const EntryKey entry = entry_of(key, self.sites[key.site.index].layer);
  if (!self.store->state(entry)) return;
  self.store->drop(entry);
  self.count_fallback(FallbackReason::kChangedInPlace);
}

// Ends the entry. Null where it gave nothing that may be used, and why.
BlockRef Session::Impl::taken(const EntryKey& entry, std::optional<FallbackReason>& why) {
  const std::optional<Bytes> unpacked =
      packer != nullptr ? packer->unpacked_size(entry) : std::optional<Bytes>();
  BlockRef output;
  while (unpacked && output == nullptr) {
    auto room = hbm->allocate(compute, *unpacked, Pool::kActivation);
    if (room) {
      output = wrap(*room);
    } else if (!make_room(room.error()) || !store->state(entry)) {  // it may be what made way
      why = FallbackReason::kHbmFull;
      return nullptr;
    }
  }
  const std::uint64_t damaged = store->damaged();
  auto found = store->take(entry);
  if (!found) {
    why = store->damaged() != damaged ? FallbackReason::kDamaged : reason_of(found.error().code);
    return nullptr;
  }
  if (!found->waited) count_fetch(SiteId{entry.index}, FetchOutcome::kHit);
  if (!unpacked) return std::move(found->block);
  if (packer->unpack(entry, *found->block, *output)) return output;
  count_fallback(FallbackReason::kCopyFailed);  // the fetch itself is counted
  return nullptr;
}

BlockRef Session::fetch(const SiteKey& key, std::optional<Bytes> size) {
  Impl& self = *impl_;
  if (!self.caching()) return nullptr;
  TERRACE_CHECK(key.site.index < self.sites.size(), "a site is declared before it is fetched");
  const EntryKey entry = entry_of(key, self.sites[key.site.index].layer);
  const auto miss = [&](std::optional<FallbackReason> why) -> BlockRef {
    self.store->drop(entry);
    if (why) self.count_fallback(*why);
    self.count_fetch(key.site, FetchOutcome::kMiss);
    return nullptr;
  };
  const auto state = self.store->state(entry);
  if (self.offered_several_times(entry) || !state ||
      self.rule_for(key.site, RulePhase::kRecompute) == RuleAction::kDiscard)
    return miss({});
  const std::optional<Bytes> unpacked =
      self.packer != nullptr ? self.packer->unpacked_size(entry) : std::optional<Bytes>();
  if (size && unpacked.value_or(self.store->size(entry)) != *size)
    return miss(FallbackReason::kRecomputeShape);
  // Bringing it back now would make the stream wait for longer than computing takes.
  if (*state == Residency::kInDdr)
    return miss(self.schedule.deviated() ? std::nullopt : std::optional(FallbackReason::kNotBack));
  const Span span(*this, key.site, Span::How::kFetched);
  std::optional<FallbackReason> why;
  BlockRef found = self.taken(entry, why);
  return why ? miss(why) : found;
}

void Session::Impl::count_fetch(SiteId site, FetchOutcome outcome) {
  static_assert(static_cast<int>(MetricKind::kScan) == static_cast<int>(SiteKind::kScan));
  metrics().add<Metric::kCacheFetches>(static_cast<MetricKind>(sites[site.index].kind), outcome, 1);
  metrics().site_groups().count(group_rows[site.index], outcome);
  switch (outcome) {
    case FetchOutcome::kHit:
      ++counters.hits;
      break;
    case FetchOutcome::kMiss:
      ++counters.misses;
      break;
    case FetchOutcome::kLate:
      ++counters.late;
      if (site.index < late_fetches.size()) ++late_fetches[site.index];
      break;
  }
}

void Session::Impl::collect_waits() {
  for (const auto& [reason, probes] : waits) count_stall(reason, probes->collect());
  for (const ResidencyStore::Wait& wait : store->collect_waits()) {
    const bool spill = wait.direction == Direction::kD2H;
    if (!spill && wait.key.what == EntryKey::What::kOutput) {
      count_fetch(SiteId{wait.key.index}, wait.late ? FetchOutcome::kLate : FetchOutcome::kHit);
    }
    if (!wait.late) continue;
    if (spill && wait.key.index < late_departures.size()) ++late_departures[wait.key.index];
    counters.stall_seconds += wait.seconds;
    const StallReason reason = spill ? StallReason::kSpillBackpressure : StallReason::kRestoreLate;
    metrics().add<Metric::kStallSeconds>(reason, wait.seconds);
    if (RunTimeline* timeline = spans.timeline())
      timeline->stalled(name_of(reason), wait.began, wait.seconds, label_of(wait.key));
  }
}

Session::Span::Span(Session& session, SiteId site, How how)
    : session_(session), active_(session.impl_->spans.watched()) {
  if (!active_) return;
  Impl& self = *session.impl_;
  self.spans.begin(self.sites[site.index].name, how == How::kComputed ? "computed" : "fetched");
}

Session::Span::Span(Session& session, const char* name)
    : session_(session), active_(session.impl_->spans.watched()) {
  if (active_) session.impl_->spans.begin(name, "");
}

Session::Span::~Span() {
  if (active_) session_.impl_->spans.end();
}

Session::Timing::Timing(Session& session, SiteId site)
    : session_(session), span_(session, site), site_(site) {
  Impl& self = *session.impl_;
  if (!self.profile) return;
  auto start = self.device.create_event();
  if (!start) return;
  active_ = self.device.record(self.compute, *start).ok();
  start_ = *start;
  if (!active_) self.device.destroy_event(start_);
}

Session::Timing::~Timing() {
  if (!active_) return;
  Impl& self = *session_.impl_;
  auto end = self.device.create_event();
  if (end && self.profile && self.device.record(self.compute, *end)) {
    self.profile->add_run(site_, start_, *end);
    return;
  }
  self.device.destroy_event(start_);
  if (end) self.device.destroy_event(*end);
}

// Room for one more saved activation inside the checkpoint budget: cached outputs make way unless the policy
// says "fail"; then, where it says "offload", the saved activations used last.
Status Session::Impl::make_checkpoint_room(const SaveKey& key, Bytes size) {
  const auto over = [&] { return store->hbm_bytes() + size > budgets.checkpoint; };
  const Contingency contingency = policy.checkpoint.contingency;
  while (over()) {
    store->poll();
    if (!over()) continue;
    const auto freed = wait_for_a_spill();
    if (!freed) return freed.error();  // tried again here it could fail for ever
    if (*freed) continue;
    if (contingency != Contingency::kFail && evict_an_output()) continue;
    if (contingency != Contingency::kOffload) {
      return out_of_budget(size, Pool::kActivation,
                           "checkpoint.budget: " + format_bytes(size) + " saved by layer " +
                               std::to_string(key.layer) + " do not fit in " +
                               format_bytes(budgets.checkpoint) +
                               "; raise it or set checkpoint.contingency = \"offload\"");
    }
    if (store->undo_a_restore()) continue;
    const auto victim = store->farthest_in_hbm(EntryKey::What::kSaved);
    if (!victim) break;  // larger than the budget: it leaves as soon as it is there
    if (auto spilled = store->spill(*victim); !spilled) return spilled;
  }
  return {};
}

Status Session::save(const SaveKey& key, BlockRef block) {
  Impl& self = *impl_;
  const Bytes size = block->size;
  if (self.store->state(entry_of(key))) {
    return Error{Errc::kInvalidArgument,
                 "layer " + std::to_string(key.layer) + " saved twice in slot " + std::to_string(key.slot) +
                     ": load it, or end or cancel the step, before it is saved again",
                 {},
                 {}};
  }
  if (auto room = self.make_checkpoint_room(key, size); !room) return room;
  self.store->keep(entry_of(key), std::move(block));
  if (self.profile)
    self.saved_peak = std::max(self.saved_peak, self.store->hbm_bytes(EntryKey::What::kSaved));
  if (size <= self.budgets.checkpoint) return {};
  return self.store->spill(entry_of(key));
}

Result<BlockRef> Session::load(const SaveKey& key) {
  while (true) {
    auto taken = impl_->store->take(entry_of(key));
    if (taken) return std::move(taken->block);
    if (taken.error().code == Errc::kNotFound) {
      return Error{Errc::kNotFound,
                   "layer " + std::to_string(key.layer) + " saved nothing in slot " +
                       std::to_string(key.slot) + ", or it was loaded before",
                   {},
                   {}};
    }
    if (!impl_->make_room(taken.error())) return impl_->explain(taken.error());
  }
}

void Session::end_step() {
  Impl& self = *impl_;
  if (!self.running) return;
  self.store->poll();
  self.end_schedule();
  self.store->drop_all(EntryKey::What::kOutput);
  self.store->drop_all(EntryKey::What::kSaved);
  if (self.packer) self.packer->forget_all();
  self.end_timing();
  if (!self.caching()) self.hbm_needed = std::max(self.hbm_needed, self.hbm->take_watermark());
  if (self.packer) self.packer->ask_for_error();
  if (self.profile && self.schedule.complete()) {
    self.measure();
    if (self.plan) self.schedule.learn();
  }
  self.profile.reset();  // of a step without backward: the next is measured in its place
  self.collect_waits();
  self.publish_usage();
  self.publish_step();
  self.spans.end_step();
  self.running = false;
  metrics().add<Metric::kSteps>(1);
  metrics().add<Metric::kStepSeconds>(seconds_of(steady_clock().now()) - self.step_started);
  ++self.step;
}

}  // namespace terrace
