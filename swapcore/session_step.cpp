// A step as the session sees it: what is kept, what is asked for again, when what left comes back.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "runtime/assert.hpp"
#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {
namespace {

// Live bytes are planned, mapped ones are limited: fragments of the pool lie between.
constexpr double kPlannedShareOfHbm = 0.96;
constexpr Bytes kProbeSize = 16_MiB;

}  // namespace

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
  if (self.rules_change()) self.make_plan();
  self.hbm->take_watermark();
}

void Session::Impl::enter(StepProfile::Phase phase, int layer) {
  store->poll();
  if (profile) profile->enter(phase, layer, hbm->take_watermark());
}

void Session::enter_forward(int layer, std::uint32_t) { impl_->enter(StepProfile::Phase::kForward, layer); }

void Session::enter_head(std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kHead, 0);
  impl_->restore_layer(static_cast<int>(impl_->layer_sites.size()) - 1, micro_batch);
}

void Session::enter_backward(int layer, std::uint32_t micro_batch) {
  impl_->enter(StepProfile::Phase::kBackward, layer);
  impl_->restore_layer(layer - 1, micro_batch);
}

// Starts bringing back what the layer will ask for, in the order in which it will. What finds no room stays
// in DDR.
void Session::Impl::restore_layer(int layer, std::uint32_t micro_batch) {
  if (layer < 0) return;
  for (const EntryKey& key : store->in_layer(layer, micro_batch)) {
    if (!store->restore(key)) return;
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
      break;
  }
}

void Session::Impl::collect_waits() {
  for (const ResidencyStore::Wait& wait : store->collect_waits()) {
    if (wait.key.what == EntryKey::What::kOutput) {
      count_fetch(SiteId{wait.key.index}, wait.late ? FetchOutcome::kLate : FetchOutcome::kHit);
    }
    if (!wait.late) continue;
    counters.stall_seconds += wait.seconds;
    metrics().add<Metric::kStallSeconds>(StallReason::kRestoreLate, wait.seconds);
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
  self.collect_waits();
  self.publish_usage();
  metrics().add<Metric::kSteps>(1);
  metrics().add<Metric::kStepSeconds>(seconds_of(steady_clock().now()) - self.step_started);
  ++self.step;
}

// The rates of the link, asked of the device or measured once by a copy each way.
Status Session::Impl::measure_link() {
  h2d_rate = device.info().h2d_bytes_per_second;
  d2h_rate = device.info().d2h_bytes_per_second;
  if (h2d_rate > 0 && d2h_rate > 0) return {};
  auto near = hbm->allocate(compute, kProbeSize, Pool::kScratch);
  if (!near) return near.error();
  auto far = ddr->allocate(kProbeSize, Pool::kScratch);
  Status status = far ? Status() : Status(far.error());
  auto ready = device.create_event();
  if (status && !ready) status = ready.error();
  if (status) {
    for (const Direction direction : {Direction::kD2H, Direction::kH2D, Direction::kD2H, Direction::kH2D}) {
      const bool out = direction == Direction::kD2H;
      const Transfer transfer{out ? far->address : near->address, out ? near->address : far->address,
                              kProbeSize};
      auto copy = copies->submit({.direction = direction, .after = *ready, .reason = CopyReason::kFetch},
                                 {&transfer, 1});
      status = copy ? copy->synchronize() : Status(copy.error());
      if (!status) break;
      const auto seconds = copies->seconds(*copy);
      if (seconds && *seconds > 0)
        (out ? d2h_rate : h2d_rate) = static_cast<double>(kProbeSize.count()) / *seconds;
    }
  }
  if (ready) device.destroy_event(*ready);
  if (far) (void)ddr->free(*far);
  (void)hbm->free(compute, *near);
  return status;
}

void Session::Impl::measure() {
  profile->enter(StepProfile::Phase::kEnd, 0, hbm->take_watermark());
  const bool finished = device.synchronize(compute).ok();
  if (!measure_link()) h2d_rate = d2h_rate = 0;  // nothing travels then: a plan for HBM alone
  Snapshot snapshot = profile->summarize(sites);
  profile.reset();
  if (!finished || snapshot.layers.size() < layer_sites.size()) return;
  snapshot.hbm_budget =
      Bytes(static_cast<std::uint64_t>(static_cast<double>(budgets.hbm.count()) * kPlannedShareOfHbm));
  snapshot.hbm_cache_limit = std::min(budgets.swapcore_hbm, saturating_sub(budgets.checkpoint, saved_peak));
  snapshot.ddr_cache_limit = budgets.swapcore_ddr;
  snapshot.h2d_bytes_per_second = h2d_rate;
  snapshot.d2h_bytes_per_second = d2h_rate;
  measured = std::move(snapshot);
  make_plan();
}

void Session::Impl::make_plan() {
  for (SiteCost& site : measured->sites) site.rule = rule_for(site.site, RulePhase::kForward);
  plan = solve(*measured, policy);
}

// Whether a rule begins or has just ended: what it held is the plan's again.
bool Session::Impl::rules_change() const {
  const auto& rules = policy.swapcore.rules;
  return measured && std::any_of(rules.begin(), rules.end(), [this](const Rule& rule) {
           return rule.first_step == step || rule.last_step + 1 == step;
         });
}

std::string Session::plan_summary() const {
  const Impl& self = *impl_;
  if (!self.plan) return self.caching() ? "no plan yet: the second step is measured" : "swap core is off";
  char text[256];
  const Plan& plan = *self.plan;
  std::snprintf(text, sizeof text,
                "%d outputs in HBM (%s), %d in DDR (%s), %d computed again: %.1f of %.1f ms saved",
                plan.hbm_sites, format_bytes(plan.hbm_bytes).c_str(), plan.ddr_sites,
                format_bytes(plan.ddr_bytes).c_str(), plan.recomputed_sites, plan.saved_seconds * 1e3,
                (plan.saved_seconds + plan.recompute_seconds) * 1e3);
  return text;
}

}  // namespace terrace
