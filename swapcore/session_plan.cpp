// What the session learns of a step and makes of it: the measured step, the plan, how right the plan was.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <system_error>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"
#include "runtime/thread_signals.hpp"
#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {
namespace {

// Live bytes are planned, mapped ones are limited: fragments of the pool lie between. At most this share of
// the budget is left to them.
constexpr double kMostFragments = 0.04;
constexpr Bytes kProbeSize = 16_MiB;
constexpr const char* kProbe = "link probe";
constexpr std::uint64_t kMostMeasureGap = 4096;  // steps

double rate(double seconds) { return static_cast<double>(kProbeSize.count()) / seconds; }

}  // namespace

void Session::Impl::publish_link_rates() const {
  metrics().set<Metric::kLinkRate>(Direction::kH2D, Bytes(static_cast<std::uint64_t>(h2d_rate)));
  metrics().set<Metric::kLinkRate>(Direction::kD2H, Bytes(static_cast<std::uint64_t>(d2h_rate)));
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
      auto copy = copies->submit(
          {.direction = direction, .after = *ready, .reason = CopyReason::kFetch, .label = kProbe},
          {&transfer, 1});
      status = copy ? copy->synchronize() : Status(copy.error());
      if (!status) break;
      const auto seconds = copies->seconds(*copy);
      if (seconds && *seconds > 0) (out ? d2h_rate : h2d_rate) = rate(*seconds);
    }
  }
  if (status) two_way_rate = measure_two_ways(*near, *far, *ready);
  if (ready) device.destroy_event(*ready);
  if (far) (void)ddr->free(*far);
  (void)hbm->free(compute, *near);
  return status;
}

// Both directions at once, bytes a second together: they share the host's memory and the link's protocol. The
// probe's blocks are written and read at one time, and their bytes are nobody's. Zero where it fails.
double Session::Impl::measure_two_ways(const Block& near, const Block& far, Event ready) const {
  const Transfer out{far.address, near.address, kProbeSize};
  const Transfer in{near.address, far.address, kProbeSize};
  auto leaving = copies->submit(
      {.direction = Direction::kD2H, .after = ready, .reason = CopyReason::kFetch, .label = kProbe},
      {&out, 1});
  auto coming = copies->submit(
      {.direction = Direction::kH2D, .after = ready, .reason = CopyReason::kFetch, .label = kProbe},
      {&in, 1});
  const bool left = leaving && leaving->synchronize().ok();
  const bool came = coming && coming->synchronize().ok();
  if (!left || !came) return 0;
  const auto leave_seconds = copies->seconds(*leaving);
  const auto come_seconds = copies->seconds(*coming);
  if (!leave_seconds || !come_seconds || *leave_seconds <= 0 || *come_seconds <= 0) return 0;
  return rate(*leave_seconds) + rate(*come_seconds);
}

void Session::Impl::measure() {
  profile->enter(StepProfile::Phase::kEnd, 0, take_peak());
  const bool finished = device.synchronize(compute).ok();
  if (!measure_link()) h2d_rate = d2h_rate = 0;  // nothing travels then: a plan for HBM alone
  publish_link_rates();
  Snapshot snapshot = profile->summarize(sites);
  profile.reset();
  if (!finished || snapshot.layers.size() < layer_sites.size()) {
    measure_gap = std::min<std::uint64_t>(2 * measure_gap, kMostMeasureGap);
    measure_from = complete_steps + measure_gap;
    if (measured) make_plan();  // the older measurement is better than none
    return;
  }
  const PoolUsage usage = hbm->usage();
  fragments = 0_B;
  leave_to_fragments(saturating_sub(usage.mapped_peak, usage.live_peak));
  hbm_needed = needed.so_far + saturating_sub(usage.mapped_peak, usage.live_peak);
  snapshot.h2d_bytes_per_second = h2d_rate;
  snapshot.d2h_bytes_per_second = d2h_rate;
  snapshot.both_bytes_per_second = two_way_rate;
  for (std::size_t i = 0; measured && i < measured->sites.size() && i < snapshot.sites.size(); ++i) {
    snapshot.sites[i].lateness = measured->sites[i].lateness;
    snapshot.sites[i].delay = measured->sites[i].delay;
  }
  measured = std::move(snapshot);
  limit_outputs();
  make_plan();
}

// Most HBM that the position which ends now held. Outputs that a rule keeps are no need: they can be dropped.
Bytes Session::Impl::take_peak() {
  const Bytes peak = hbm->take_watermark();
  const Bytes outputs = store->hbm_bytes(EntryKey::What::kOutput);
  needed.so_far = std::max(needed.so_far, saturating_sub(peak, std::min(outputs, needed.outputs)));
  needed.outputs = outputs;
  return peak;
}

// What the budgets of now leave to cached outputs.
void Session::Impl::limit_outputs() {
  measured->hbm_cache_limit = std::min(budgets.swapcore_hbm, saturating_sub(budgets.checkpoint, saved_peak));
  const PoolUsage in_ddr = ddr->usage();
  Bytes at_home;
  for (const Pool pool : {Pool::kOptimizer, Pool::kExpert, Pool::kGradient})
    at_home += in_ddr.live_by_pool[static_cast<std::size_t>(pool)];
  measured->ddr_cache_limit = std::min(budgets.swapcore_ddr, saturating_sub(budgets.ddr, at_home));
  if (numa_nodes.size() == 1) measured->ddr_nodes = {{numa_nodes[0], measured->ddr_cache_limit}};
}

void Session::Impl::leave_to_fragments(Bytes bytes) {
  const double most = kMostFragments * static_cast<double>(budgets.hbm.count());
  fragments = std::min(std::max(fragments, bytes), Bytes(static_cast<std::uint64_t>(most)));
}

void Session::Impl::prepare_plan() {
  next_plan = {};
  measured->hbm_budget = budgets.hbm - fragments;
  missed_room = 0_B;
  for (SiteCost& site : measured->sites) site.rule = rule_for(site.site, RulePhase::kForward);
}

void Session::Impl::make_plan() {
  prepare_plan();
  begin_with(solve(*measured, policy));
}

// Beside the steps, which go on by the plan there is: the device would wait for the solver.
void Session::Impl::make_next_plan() {
  prepare_plan();
  try {
    next_plan = std::async(std::launch::async, [snapshot = *measured, how = policy] {
      leave_signals_to_others();
      return solve(snapshot, how);
    });
  } catch (const std::system_error&) {  // no thread to be had
    begin_with(solve(*measured, policy));
  }
}

void Session::Impl::take_next_plan() {
  if (next_plan.valid() && next_plan.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
    begin_with(next_plan.get());
}

void Session::Impl::begin_with(Plan fresh) {
  plan = std::move(fresh);
  modelled = plan->prediction;
  residual.begin(modelled);
  plan->prediction = residual.corrected(modelled);
  drift.solved_again();
  late_fetches.assign(sites.size(), 0);
  late_departures.assign(sites.size(), 0);
  if (RunTimeline* timeline = spans.timeline()) timeline->note("plan", summary());
}

// The step that begins is measured: nothing is cached in it.
void Session::Impl::start_measuring(const char* why) {
  plan.reset();
  next_plan = {};
  schedule.forget();
  profile = std::make_unique<StepProfile>(device, compute);
  needed = {};
  if (RunTimeline* timeline = spans.timeline()) timeline->note("measure", why);
}

void Session::Impl::begin_timing() {
  for (std::optional<Event>* event : {&step_events.begun, &step_events.ended}) {
    if (*event) continue;
    if (auto created = device.create_event()) *event = *created;
  }
  step_events.pending = false;
  step_events.stalled_before = counters.stall_seconds;
  step_events.hbm_peak = step_events.ddr_peak = 0_B;
  if (plan && step_events.begun && step_events.ended)
    step_events.pending = device.record(compute, *step_events.begun).ok();
}

void Session::Impl::end_timing() {
  if (!step_events.pending) return;
  step_events.pending = device.record(compute, *step_events.ended).ok();
  step_events.hbm_peak = hbm->take_watermark();
}

// The last step, if it ran by the plan and its events have completed: nobody waits for them.
std::optional<Prediction::Measured> Session::Impl::timed_step() {
  if (!plan || !step_events.pending || !device.completed(*step_events.ended)) return std::nullopt;
  const auto seconds = device.seconds_between(*step_events.begun, *step_events.ended);
  if (!seconds) return std::nullopt;
  collect_waits();
  return Prediction::Measured{.step_seconds = *seconds,
                              .stall_seconds = counters.stall_seconds - step_events.stalled_before,
                              .hbm_peak = step_events.hbm_peak,
                              .ddr_peak = step_events.ddr_peak};
}

// A plan is made anew where restores keep coming late, and a step is measured anew where steps take another
// time than those right after the plan was made.
void Session::Impl::learn_from_the_last_step() {
  const auto last = timed_step();
  if (last) {
    measure_link_use();
    publish_prediction(*last);
    drift.add(last->step_seconds, last->stall_seconds);
    if (residual.add(*last)) plan->prediction = residual.corrected(modelled);
  }
  if (!plan) return;
  if (drift.drifted()) {
    drift.measured_again();
    start_measuring("steps have changed");
  } else if (next_plan.valid()) {
    take_next_plan();
  } else if (last && (note_missed_room() || (drift.often_late() && note_late_trips()))) {
    make_next_plan();
  }
}

// Once for each step that ran by a plan and was timed.
void Session::Impl::publish_prediction(const Prediction::Measured& last) const {
  const Prediction& prediction = plan->prediction;
  MetricsPage& page = metrics();
  page.add<Metric::kPlannedSteps>(1);
  page.add<Metric::kPlannedStepSeconds>(Estimate::kPredicted, prediction.step_seconds);
  page.add<Metric::kPlannedStepSeconds>(Estimate::kMeasured, last.step_seconds);
  page.add<Metric::kPlannedStallSeconds>(Estimate::kPredicted, prediction.stall_seconds);
  page.add<Metric::kPlannedStallSeconds>(Estimate::kMeasured, last.stall_seconds);
  page.set<Metric::kPlannedPeakBytes>(TierId::kHbm, Estimate::kPredicted, prediction.hbm_peak);
  page.set<Metric::kPlannedPeakBytes>(TierId::kHbm, Estimate::kMeasured, last.hbm_peak);
  page.set<Metric::kPlannedPeakBytes>(TierId::kDdr, Estimate::kPredicted, prediction.ddr_peak);
  page.set<Metric::kPlannedPeakBytes>(TierId::kDdr, Estimate::kMeasured, last.ddr_peak);
}

// Where the trainer found no room although the plan had left it, fragments are larger than was thought.
bool Session::Impl::note_missed_room() {
  if (missed_room == 0_B) return false;
  const Bytes before = fragments;
  leave_to_fragments(fragments + missed_room);
  missed_room = 0_B;
  return fragments > before;
}

// Lateness only ever grows, up to a limit: solving again comes to an end.
bool Session::Impl::note_late_trips() {
  bool any = false;
  const auto note = [&any](int& late, int& noted) {
    if (late > 0 && noted <= kMostLead) {
      ++noted;
      any = true;
    }
    late = 0;
  };
  for (SiteCost& site : measured->sites) {
    note(late_fetches[site.site.index], site.lateness);
    note(late_departures[site.site.index], site.delay);
  }
  return any;
}

void Session::Impl::forget_timing() {
  for (std::optional<Event>* event : {&step_events.begun, &step_events.ended}) {
    if (*event) device.destroy_event(**event);
    event->reset();
  }
  step_events.pending = false;
}

// Whether a rule begins or has just ended: what it held is the plan's again.
bool Session::Impl::rules_change() const {
  const auto& rules = policy.swapcore.rules;
  return measured && std::any_of(rules.begin(), rules.end(), [this](const Rule& rule) {
           return rule.first_step == step || rule.last_step + 1 == step;
         });
}

std::string Session::Impl::summary() const {
  if (!plan) return caching() ? "no plan yet: the second step is measured" : "swap core is off";
  char text[320];
  std::snprintf(
      text, sizeof text,
      "%d outputs in HBM (%s), %d in DDR (%s), %d computed again: %.1f of %.1f ms saved, %.1f ms a step "
      "expected",
      plan->hbm_sites, format_bytes(plan->hbm_bytes).c_str(), plan->ddr_sites,
      format_bytes(plan->ddr_bytes).c_str(), plan->recomputed_sites, plan->saved_seconds * 1e3,
      (plan->saved_seconds + plan->recompute_seconds) * 1e3, plan->prediction.step_seconds * 1e3);
  return text;
}

std::string Session::plan_summary() const { return impl_->summary(); }
const Plan* Session::plan() const { return impl_->plan ? &*impl_->plan : nullptr; }
const Snapshot* Session::snapshot() const { return impl_->measured ? &*impl_->measured : nullptr; }

std::optional<Prediction::Error> Session::prediction_error() const {
  const auto last = impl_->timed_step();
  if (!last) return std::nullopt;
  return impl_->plan->prediction.error(impl_->residual.typical(*last));
}

}  // namespace terrace
