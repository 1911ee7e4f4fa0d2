#include "swapcore/plan/windows.hpp"

#include <algorithm>

namespace terrace {
namespace {

// The part of the link's rate that a plan counts on: measured windows vary, and a late restore costs more
// than a missed one.
constexpr double kLinkShare = 0.95;

}  // namespace

Windows::Windows(const Snapshot& snapshot)
    : snapshot_(snapshot),
      layers_(snapshot.layers.size()),
      d2h_(snapshot.d2h_bytes_per_second * kLinkShare),
      h2d_(snapshot.h2d_bytes_per_second * kLinkShare),
      d2h_shared_(d2h_),
      h2d_shared_(h2d_),
      by_layer_(layers_),
      ready_(snapshot.sites.size()) {
  if (snapshot.both_bytes_per_second > 0) {
    const double half = snapshot.both_bytes_per_second * kLinkShare / 2;
    d2h_shared_ = std::min(d2h_, half);
    h2d_shared_ = std::min(h2d_, half);
  }
  for (std::size_t i = 0; i < snapshot.sites.size(); ++i) {
    const auto layer = static_cast<std::size_t>(snapshot.sites[i].layer);
    if (layer < layers_) by_layer_[layer].push_back(i);
  }
  // Where it was not measured: an operator takes as long in forward as when it runs again.
  for (std::size_t l = 0; l < layers_; ++l) {
    double done = 0;
    for (const std::size_t i : by_layer_[l]) {
      const SiteCost& site = snapshot.sites[i];
      done = site.ready_seconds > 0 ? site.ready_seconds : done + site.recompute_seconds;
      ready_[i] = std::min(done, snapshot.layers[l].forward_seconds);
    }
    // Backward asks in the order in which forward had them, whatever order they were declared in.
    std::stable_sort(by_layer_[l].begin(), by_layer_[l].end(),
                     [this](std::size_t a, std::size_t b) { return ready_[a] < ready_[b]; });
  }
}

// The moments as they follow one another if nothing stalls: what is not computed again shortens a backward.
void Windows::start_moments(const std::vector<Placement>& placements) {
  now_.starts.assign(2 * layers_ + 2, 0);
  double at = 0;
  for (std::size_t l = 0; l < layers_; ++l) {
    now_.starts[l] = at;
    at += snapshot_.layers[l].forward_seconds;
  }
  now_.starts[layers_] = at;
  at += snapshot_.head.forward_seconds;
  for (std::size_t l = layers_; l-- > 0;) {
    now_.starts[backward(l)] = at;
    double saved = 0;
    for (const std::size_t i : by_layer_[l])
      if (placements[i] != Placement::kRecompute) saved += snapshot_.sites[i].recompute_seconds;
    at += std::max(0.0, snapshot_.layers[l].backward_seconds - saved);
  }
  now_.starts.back() = at;
}

void Windows::hold(std::size_t first, std::size_t end, Bytes bytes) {
  if (first >= end) return;
  enter_[first] += bytes.count();
  leave_[end] += bytes.count();
}

// In order of forward, one behind the other; what has not gone when the head begins may share the link with
// what returns.
bool Windows::spill(const std::vector<Placement>& placements) {
  now_.trips.clear();
  double free = 0;
  std::size_t moment = 0;
  const double head = now_.starts[layers_];
  for (std::size_t l = 0; l < layers_; ++l) {
    for (const std::size_t i : by_layer_[l]) {
      if (placements[i] != Placement::kDdr) continue;
      if (d2h_ <= 0 || h2d_ <= 0) return false;
      const Bytes bytes = snapshot_.sites[i].bytes;
      const double start = std::max(free, now_.starts[l] + ready_[i]);
      double end = start + static_cast<double>(bytes.count()) / d2h_;
      if (end > head) {
        const double alone = std::max(0.0, head - start);
        end = std::max(start, head) + (static_cast<double>(bytes.count()) - alone * d2h_) / d2h_shared_;
      }
      free = end;
      while (moment < 2 * layers_ && now_.starts[moment + 1] < end) ++moment;
      const auto delay = static_cast<std::size_t>(std::clamp(snapshot_.sites[i].delay, 0, kMostLead));
      const std::size_t departure = std::min(std::max(moment, l) + 1 + delay, 2 * layers_ + 1);
      hold(l, departure, bytes);
      now_.trips.push_back(
          {.site = i, .departure = departure, .bytes = bytes, .spill_start = start, .spill_end = end});
      now_.ddr += bytes;
    }
  }
  spilled_ = free;
  return now_.ddr <= snapshot_.ddr_cache_limit;
}

// How long before `end` a restore must begin: slower while something still leaves.
double Windows::restore_seconds(double end, Bytes bytes) const {
  const auto size = static_cast<double>(bytes.count());
  const double alone = std::max(0.0, end - spilled_);
  if (alone * h2d_ >= size) return size / h2d_;
  return alone + (size - alone * h2d_) / h2d_shared_;
}

// As late as each can start and still be back when it is asked for, so that HBM is held for the shortest
// time; in whole moments, since that is when the session submits. One that came late before starts earlier.
bool Windows::choose_triggers() {
  auto& trips = now_.trips;
  double free = now_.starts.back();
  std::size_t moment = 2 * layers_;
  for (std::size_t k = trips.size(); k-- > 0;) {
    Timeline::Trip& trip = trips[k];
    const SiteCost& site = snapshot_.sites[trip.site];
    const std::size_t own = backward(static_cast<std::size_t>(site.layer));
    const double end = std::min(needed_[k], free);
    free = end - restore_seconds(end, trip.bytes);
    moment = std::min(moment, own);
    while (moment > layers_ && now_.starts[moment] > free) --moment;
    const auto lead = static_cast<std::size_t>(std::clamp(site.lateness, 0, kMostLead));
    moment = std::max(layers_, moment - std::min(moment, lead));
    trip.trigger = moment;
    if (trip.departure > moment) return false;
    hold(moment, own, trip.bytes);
  }
  return true;
}

// What really happens then: restores follow one another from their triggers on, and whoever comes late is
// waited for.
void Windows::restore_in_time(const std::vector<Placement>& placements) {
  double free = 0;
  double delay = 0;
  auto trip = now_.trips.begin();
  for (std::size_t l = layers_; l-- > 0;) {
    const std::size_t own = backward(l);
    const double window = now_.starts[own + 1] - now_.starts[own];
    double at = now_.starts[own] + delay;
    now_.starts[own] = at;
    double end = at + window;
    for (const std::size_t i : by_layer_[l]) {
      if (placements[i] == Placement::kRecompute)
        at = std::min(end, at + snapshot_.sites[i].recompute_seconds);
      if (placements[i] != Placement::kDdr) continue;
      const auto size = static_cast<double>(trip->bytes.count());
      trip->restore_start = std::max(free, now_.starts[trip->trigger]);
      const double shared = std::max(0.0, spilled_ - trip->restore_start);
      free =
          trip->restore_start +
          (shared * h2d_shared_ >= size ? size / h2d_shared_ : shared + (size - shared * h2d_shared_) / h2d_);
      trip->restore_end = free;
      const double wait = std::max(0.0, free - at);
      at += wait;
      end += wait;
      delay += wait;
      ++trip;
    }
  }
  now_.starts.back() += delay;
  now_.stall_seconds = delay;
  now_.seconds = now_.starts.back();
}

bool Windows::fits(const std::vector<Placement>& placements) {
  Bytes kept;
  for (std::size_t l = 0; l < layers_; ++l) {
    for (const std::size_t i : by_layer_[l]) {
      if (placements[i] != Placement::kHbm) continue;
      kept += snapshot_.sites[i].bytes;
      hold(l, backward(l), snapshot_.sites[i].bytes);
    }
  }
  if (kept > snapshot_.hbm_cache_limit) return false;
  std::uint64_t held = 0;
  now_.hbm.resize(2 * layers_ + 1);
  for (std::size_t m = 0; m <= 2 * layers_; ++m) {
    held += enter_[m];
    held -= leave_[m];
    const Bytes base = m < layers_    ? snapshot_.layers[m].forward_peak
                       : m == layers_ ? std::max(snapshot_.head.forward_peak, snapshot_.head.backward_peak)
                                      : snapshot_.layers[2 * layers_ - m].backward_peak;
    now_.hbm[m] = base + Bytes(held);
    if (held > 0 && now_.hbm[m] > snapshot_.hbm_budget) return false;
  }
  return true;
}

const Timeline* Windows::simulate(const std::vector<Placement>& placements) {
  enter_.assign(2 * layers_ + 2, 0);
  leave_.assign(2 * layers_ + 2, 0);
  now_.ddr = 0_B;
  now_.stall_seconds = 0;
  start_moments(placements);
  if (!spill(placements)) return nullptr;
  // From the order of forward to that of use: layers backwards, sites of a layer as they are.
  auto& trips = now_.trips;
  std::stable_sort(trips.begin(), trips.end(), [this](const auto& a, const auto& b) {
    return snapshot_.sites[a.site].layer > snapshot_.sites[b.site].layer;
  });
  needed_.clear();
  for (std::size_t l = layers_; l-- > 0;) {
    double at = now_.starts[backward(l)];
    for (const std::size_t i : by_layer_[l]) {
      if (placements[i] == Placement::kDdr) needed_.push_back(at);
      if (placements[i] == Placement::kRecompute)
        at = std::min(at + snapshot_.sites[i].recompute_seconds, now_.starts[backward(l) + 1]);
    }
  }
  if (!choose_triggers() || !fits(placements)) return nullptr;
  restore_in_time(placements);
  return &now_;
}

}  // namespace terrace
