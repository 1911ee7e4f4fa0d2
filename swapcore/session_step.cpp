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
  return plan ? plan->placements[site.index] : Placement::kRecompute;
}

void Session::begin_step() {
  Impl& self = *impl_;
  self.step_started = seconds_of(steady_clock().now());
  if (self.caching() && self.step == kMeasuredStep && !self.plan) {
    self.profile = std::make_unique<StepProfile>(self.device, self.compute);
  }
  self.learn_from_the_last_step();
  if (self.rules_change() && !self.profile) self.make_plan();
  self.hbm->take_watermark();
  if (self.profile) self.profile->enter(StepProfile::Phase::kBegin, 0, 0_B);
  self.begin_timing();
}

void Session::Impl::enter(StepProfile::Phase phase, int layer) {
  store->poll();
  if (profile) profile->enter(phase, layer, hbm->take_watermark());
}

void Session::enter_forward(int layer, std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kForward, layer);
  impl_->depart_planned(static_cast<std::size_t>(layer), micro_batch);
}

void Session::enter_head(std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kHead, 0);
  impl_->step_events.ddr_peak =
      std::max(impl_->step_events.ddr_peak, impl_->store->ddr_bytes(EntryKey::What::kOutput));
  const std::size_t layers = impl_->layer_sites.size();
  impl_->depart_planned(layers, micro_batch);
  impl_->restore_layer(static_cast<int>(layers) - 1, micro_batch);
  impl_->restore_planned(layers, micro_batch);
}

void Session::enter_backward(int layer, std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kBackward, layer);
  const std::size_t moment = 2 * impl_->layer_sites.size() - static_cast<std::size_t>(layer);
  impl_->depart_planned(moment, micro_batch);
  impl_->restore_layer(layer - 1, micro_batch);
  impl_->restore_planned(moment, micro_batch);
}

// What has left by this moment, as planned, holds no HBM from here on. What the store refuses it settles when
// the copy is seen to have ended.
void Session::Impl::depart_planned(std::size_t moment, std::uint32_t micro_batch) {
  if (!plan || moment >= plan->departures.size()) return;
  for (const SiteId site : plan->departures[moment])
    (void)store->depart(entry_of({site, micro_batch}, sites[site.index].layer));
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
  if (!plan || moment >= plan->restores.size()) return;
  for (const SiteId site : plan->restores[moment]) {
    const EntryKey key = entry_of({site, micro_batch}, sites[site.index].layer);
    if (store->state(key) && !store->restore(key)) return;
  }
}

void Session::offer(const SiteKey& key, const BlockRef& output) {
  Impl& self = *impl_;
  if (!self.caching()) return;
  TERRACE_CHECK(key.site.index < self.sites.size(), "a site is declared before it is offered");
  if (self.profile) self.profile->add_output(key.site, output->size);
  const Placement placement = self.placement(key.site);
  if (placement == Placement::kRecompute) return;
  const Bytes size = output->size;
  if (self.store->hbm_bytes() + size > self.budgets.checkpoint) return;
  // What travels is in HBM only on its way: its limit is DDR's.
  const bool travels = placement == Placement::kDdr;
  const Bytes held = travels ? self.store->ddr_bytes(EntryKey::What::kOutput)
                             : self.store->hbm_bytes(EntryKey::What::kOutput);
  if (held + size > (travels ? self.budgets.swapcore_ddr : self.budgets.swapcore_hbm)) return;
  const EntryKey entry = entry_of(key, self.sites[key.site.index].layer);
  self.store->keep(entry, output);
  if (travels && !self.store->spill(entry)) self.store->drop(entry);
}

BlockRef Session::fetch(const SiteKey& key) {
  Impl& self = *impl_;
  if (!self.caching()) return nullptr;
  TERRACE_CHECK(key.site.index < self.sites.size(), "a site is declared before it is fetched");
  const EntryKey entry = entry_of(key, self.sites[key.site.index].layer);
  const auto state = self.store->state(entry);
  // Bringing it back now would make the stream wait for longer than computing takes.
  if (!state || *state == Residency::kInDdr ||
      self.rule_for(key.site, RulePhase::kRecompute) == RuleAction::kDiscard) {
    self.store->drop(entry);
    self.count_fetch(key.site, FetchOutcome::kMiss);
    return nullptr;
  }
  auto taken = self.store->take(entry);
  if (!taken) {
    self.store->drop(entry);
    self.count_fetch(key.site, FetchOutcome::kMiss);
    return nullptr;
  }
  if (!taken->waited) self.count_fetch(key.site, FetchOutcome::kHit);
  return std::move(taken->block);
}

void Session::Impl::count_fetch(SiteId site, FetchOutcome outcome) {
  static_assert(static_cast<int>(MetricKind::kScan) == static_cast<int>(SiteKind::kScan));
  metrics().add<Metric::kCacheFetches>(static_cast<MetricKind>(sites[site.index].kind), outcome, 1);
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
  for (const ResidencyStore::Wait& wait : store->collect_waits()) {
    const bool spill = wait.direction == Direction::kD2H;
    if (!spill && wait.key.what == EntryKey::What::kOutput) {
      count_fetch(SiteId{wait.key.index}, wait.late ? FetchOutcome::kLate : FetchOutcome::kHit);
    }
    if (!wait.late) continue;
    if (spill && wait.key.index < late_departures.size()) ++late_departures[wait.key.index];
    counters.stall_seconds += wait.seconds;
    metrics().add<Metric::kStallSeconds>(spill ? StallReason::kSpillBackpressure : StallReason::kRestoreLate,
                                         wait.seconds);
  }
}

Session::Timing::Timing(Session& session, SiteId site) : session_(session), site_(site) {
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
  self.store->poll();
  self.store->drop_all(EntryKey::What::kOutput);
  if (self.profile) self.measure();
  self.end_timing();
  self.collect_waits();
  self.publish_usage();
  metrics().add<Metric::kSteps>(1);
  metrics().add<Metric::kStepSeconds>(seconds_of(steady_clock().now()) - self.step_started);
  ++self.step;
}

}  // namespace terrace
