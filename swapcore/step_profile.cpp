#include "swapcore/step_profile.hpp"

#include <algorithm>
#include <map>
#include <string>

namespace terrace {

StepProfile::~StepProfile() {
  for (const Mark& mark : marks_) device_.destroy_event(mark.event);
  for (const Run& run : runs_) {
    device_.destroy_event(run.start);
    device_.destroy_event(run.end);
  }
}

void StepProfile::enter(Phase phase, int layer, Bytes peak) {
  if (!marks_.empty()) marks_.back().peak = peak;
  auto event = device_.create_event();
  if (!event) return;
  if (!device_.record(compute_, *event)) {
    device_.destroy_event(*event);
    return;
  }
  marks_.push_back({phase, layer, *event, {}});
}

void StepProfile::add_run(SiteId site, Event start, Event end) {
  runs_.push_back({site, start, end, marks_.empty() ? 0 : marks_.size() - 1});
}

void StepProfile::add_output(SiteId site, const Sizes& sizes) { outputs_.push_back({site, sizes}); }

void StepProfile::add_positions(Snapshot& snapshot) const {
  // Micro-batches pass each position several times: windows are averages, peaks are peaks.
  std::map<std::pair<Phase, int>, int> passes;
  for (const Mark& mark : marks_) ++passes[{mark.phase, mark.layer}];
  snapshot.micro_batches = std::max(1, passes[{Phase::kHead, 0}]);
  for (std::size_t i = 0; i + 1 < marks_.size(); ++i) {
    const Mark& mark = marks_[i];
    if (mark.phase == Phase::kEnd) continue;
    const auto seconds = device_.seconds_between(mark.event, marks_[i + 1].event);
    const double share = (seconds ? *seconds : 0.0) / passes[{mark.phase, mark.layer}];
    if (mark.phase == Phase::kBegin || mark.phase == Phase::kUpdate) {
      snapshot.other_seconds += share;
      snapshot.other_peak = std::max(snapshot.other_peak, mark.peak);
      continue;
    }
    if (mark.phase == Phase::kHead) {
      snapshot.head.forward_seconds += share;
      snapshot.head.backward_seconds += share;
      snapshot.head.forward_peak = std::max(snapshot.head.forward_peak, mark.peak);
      snapshot.head.backward_peak = snapshot.head.forward_peak;
      continue;
    }
    const auto layer = static_cast<std::size_t>(mark.layer);
    if (snapshot.layers.size() <= layer) snapshot.layers.resize(layer + 1);
    Position& position = snapshot.layers[layer];
    const bool forward = mark.phase == Phase::kForward;
    (forward ? position.forward_seconds : position.backward_seconds) += share;
    Bytes& peak = forward ? position.forward_peak : position.backward_peak;
    peak = std::max(peak, mark.peak);
  }
}

// When the output was there, since its layer's forward began; nothing for a run of another position.
std::optional<double> StepProfile::ready_seconds(const Run& run, const SiteSpec& site) const {
  if (run.mark >= marks_.size()) return std::nullopt;
  const Mark& mark = marks_[run.mark];
  if (mark.phase != Phase::kForward || mark.layer != site.layer) return std::nullopt;
  const auto seconds = device_.seconds_between(mark.event, run.end);
  return seconds ? std::optional<double>(*seconds) : std::nullopt;
}

void StepProfile::add_sites(Snapshot& snapshot, const std::vector<SiteSpec>& sites) const {
  struct Cost {
    double seconds = 0;
    std::uint64_t runs = 0;
  };
  std::map<std::string, Cost> by_group;
  std::vector<double> ready(sites.size());
  for (const Run& run : runs_) {
    if (const auto at = ready_seconds(run, sites[run.site.index]))
      ready[run.site.index] = std::max(ready[run.site.index], *at);
    const auto seconds = device_.seconds_between(run.start, run.end);
    if (!seconds) continue;
    Cost& cost = by_group[sites[run.site.index].group];
    cost.seconds += *seconds;
    ++cost.runs;
  }
  std::vector<Sizes> sizes(sites.size());
  for (const Output& output : outputs_) {
    Sizes& most = sizes[output.site.index];
    most = {std::max(most.whole, output.sizes.whole), std::max(most.travels, output.sizes.travels)};
  }
  for (std::uint32_t i = 0; i < sites.size(); ++i) {
    const Cost& cost = by_group[sites[i].group];
    const double seconds = cost.runs == 0 ? 0.0 : cost.seconds / static_cast<double>(cost.runs);
    snapshot.sites.push_back({.site = SiteId{i},
                              .layer = sites[i].layer,
                              .bytes = sizes[i].whole,
                              .recompute_seconds = seconds,
                              .ready_seconds = ready[i],
                              .travel_bytes = sizes[i].travels});
  }
}

// What a layer's forward took beside its timed sites belongs to the others, by their bytes: a program that
// times nothing still gets a plan.
void StepProfile::share_untimed(Snapshot& snapshot) {
  std::vector<double> left(snapshot.layers.size());
  std::vector<Bytes> untimed(snapshot.layers.size());
  for (std::size_t i = 0; i < left.size(); ++i) left[i] = snapshot.layers[i].forward_seconds;
  const auto in_a_layer = [&](const SiteCost& site) {
    return site.layer >= 0 && static_cast<std::size_t>(site.layer) < left.size();
  };
  for (const SiteCost& site : snapshot.sites) {
    if (!in_a_layer(site)) continue;
    const auto layer = static_cast<std::size_t>(site.layer);
    left[layer] = std::max(0.0, left[layer] - site.recompute_seconds);
    if (site.recompute_seconds == 0) untimed[layer] += site.bytes;
  }
  for (SiteCost& site : snapshot.sites) {
    if (!in_a_layer(site) || site.recompute_seconds != 0 || site.bytes == 0_B) continue;
    const auto layer = static_cast<std::size_t>(site.layer);
    site.recompute_seconds =
        left[layer] * static_cast<double>(site.bytes.count()) / static_cast<double>(untimed[layer].count());
  }
}

Snapshot StepProfile::summarize(const std::vector<SiteSpec>& sites) const {
  Snapshot snapshot;
  add_positions(snapshot);
  add_sites(snapshot, sites);
  share_untimed(snapshot);
  return snapshot;
}

}  // namespace terrace
