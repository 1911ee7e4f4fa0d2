#include "swapcore/plan/windows.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "runtime/assert.hpp"

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
      ready_(snapshot.sites.size()),
      travelling_(layers_),
      saved_(layers_),
      node_(snapshot.sites.size()) {
  learn_order();
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

void Windows::learn_order() {
  using Phase = Moment::Phase;
  moments_ = snapshot_.schedule;
  if (moments_.empty()) {
    for (std::size_t l = 0; l < layers_; ++l) moments_.push_back({Phase::kForward, static_cast<int>(l), 0});
    moments_.push_back({Phase::kHead, 0, 0});
    for (std::size_t l = layers_; l-- > 0;) moments_.push_back({Phase::kBackward, static_cast<int>(l), 0});
  }
  find_backwards();
  while (now_.head < moments_.size() && is(now_.head, Phase::kForward)) ++now_.head;
}

void Windows::find_backwards() {
  std::map<std::pair<int, std::uint32_t>, std::size_t> forward;
  std::vector<std::uint64_t> open(layers_);
  backward_.assign(moments_.size(), 0);
  first_trip_.assign(moments_.size(), 0);
  in_flight_.assign(layers_, 0);
  for (std::size_t m = 0; m < moments_.size(); ++m) {
    const Moment& moment = moments_[m];
    if (moment.phase == Moment::Phase::kHead) continue;
    TERRACE_CHECK(moment.layer >= 0 && layer_of(m) < layers_, "a schedule names layers of the snapshot");
    std::uint64_t& now_open = open[layer_of(m)];
    const auto key = std::pair(moment.layer, moment.micro_batch);
    if (moment.phase == Moment::Phase::kForward) {
      TERRACE_CHECK(forward.emplace(key, m).second, "each layer and micro-batch goes forward once");
      forwards_.push_back(m);
      in_flight_[layer_of(m)] = std::max(in_flight_[layer_of(m)], ++now_open);
    } else {
      const auto found = forward.find(key);
      TERRACE_CHECK(found != forward.end() && backward_[found->second] == 0,
                    "each layer and micro-batch goes backward once, behind its forward");
      backwards_.push_back(m);
      backward_[found->second] = m;
      --now_open;
    }
  }
  for (const std::uint64_t left : open) TERRACE_CHECK(left == 0, "every forward has its backward");
}

// What of each layer is not computed again, and where it is to be: as much of it at a time as is in flight,
// in DDR on the first node with room for that.
bool Windows::count(const std::vector<Placement>& placements) {
  Bytes kept;
  now_.ddr = 0_B;
  on_node_.assign(snapshot_.ddr_nodes.size(), 0);
  for (std::size_t l = 0; l < layers_; ++l) {
    saved_[l] = 0;
    travelling_[l] = 0;
    for (const std::size_t i : by_layer_[l]) {
      if (placements[i] == Placement::kRecompute) continue;
      const SiteCost& site = snapshot_.sites[i];
      saved_[l] += site.recompute_seconds;
      if (placements[i] == Placement::kHbm) {
        kept += Bytes(site.bytes.count() * in_flight_[l]);
        continue;
      }
      ++travelling_[l];
      const Bytes bytes(travelling(site).count() * in_flight_[l]);
      now_.ddr += bytes;
      if (!on_node_.empty() && !settle_on_a_node(i, bytes)) return false;
    }
  }
  return kept <= snapshot_.hbm_cache_limit && now_.ddr <= snapshot_.ddr_cache_limit &&
         (now_.ddr == 0_B || (d2h_ > 0 && h2d_ > 0));
}

bool Windows::settle_on_a_node(std::size_t site, Bytes bytes) {
  for (std::size_t node = 0; node < on_node_.size(); ++node) {
    if (on_node_[node] + bytes.count() > snapshot_.ddr_nodes[node].limit.count()) continue;
    on_node_[node] += bytes.count();
    node_[site] = node;
    return true;
  }
  return false;
}

// The moments as they follow one another if nothing stalls: what is not computed again shortens a backward.
void Windows::start_moments() {
  now_.starts.resize(moments_.size() + 1);
  double at = 0;
  for (std::size_t m = 0; m < moments_.size(); ++m) {
    now_.starts[m] = at;
    switch (moments_[m].phase) {
      case Moment::Phase::kForward:
        at += snapshot_.layers[layer_of(m)].forward_seconds;
        break;
      case Moment::Phase::kHead:
        at += snapshot_.head.forward_seconds;
        break;
      case Moment::Phase::kBackward:
        at += std::max(0.0, snapshot_.layers[layer_of(m)].backward_seconds - saved_[layer_of(m)]);
        break;
    }
  }
  now_.starts.back() = at;
}

void Windows::hold(std::size_t first, std::size_t end, Bytes bytes) {
  if (first >= end) return;
  enter_[first] += bytes.count();
  leave_[end] += bytes.count();
}

std::vector<int> Windows::nodes() const {
  std::vector<int> nodes(snapshot_.sites.size(), -1);
  for (const Timeline::Trip& trip : now_.trips)
    if (!snapshot_.ddr_nodes.empty()) nodes[trip.site] = snapshot_.ddr_nodes[node_[trip.site]].node;
  return nodes;
}

// Trips are kept in order of use: by their backward, those of a layer as they are.
void Windows::make_room_for_trips() {
  std::size_t trips = 0;
  for (const std::size_t m : backwards_) {
    first_trip_[m] = trips;
    trips += travelling_[layer_of(m)];
  }
  now_.trips.resize(trips);
}

// In order of forward, one behind the other; what has not gone when the head begins may share the link with
// what returns.
void Windows::spill(const std::vector<Placement>& placements) {
  double free = 0;
  std::size_t moment = 0;
  const double head = now_.starts[now_.head];
  for (const std::size_t m : forwards_) {
    if (travelling_[layer_of(m)] == 0) continue;
    std::size_t next = first_trip_[backward_[m]];
    for (const std::size_t i : by_layer_[layer_of(m)]) {
      if (placements[i] != Placement::kDdr) continue;
      const Bytes bytes = travelling(snapshot_.sites[i]);
      const double start = std::max(free, now_.starts[m] + ready_[i]);
      double end = start + static_cast<double>(bytes.count()) / d2h_;
      if (end > head) {
        const double alone = std::max(0.0, head - start);
        end = std::max(start, head) + (static_cast<double>(bytes.count()) - alone * d2h_) / d2h_shared_;
      }
      free = end;
      while (moment + 1 < moments_.size() && now_.starts[moment + 1] < end) ++moment;
      const auto delay = static_cast<std::size_t>(std::clamp(snapshot_.sites[i].delay, 0, kMostLead));
      const std::size_t departure = std::min(std::max(moment, m) + 1 + delay, moments_.size());
      hold(m, departure, bytes);
      now_.trips[next++] = {.site = i,
                            .micro_batch = moments_[m].micro_batch,
                            .own = backward_[m],
                            .departure = departure,
                            .bytes = bytes,
                            .spill_start = start,
                            .spill_end = end};
    }
  }
  spilled_ = free;
}

// How long before `end` a restore must begin: slower while something still leaves.
double Windows::restore_seconds(double end, Bytes bytes) const {
  const auto size = static_cast<double>(bytes.count());
  const double alone = std::max(0.0, end - spilled_);
  if (alone * h2d_ >= size) return size / h2d_;
  return alone + (size - alone * h2d_) / h2d_shared_;
}

void Windows::note_needs(const std::vector<Placement>& placements) {
  needed_.clear();
  for (const std::size_t m : backwards_) {
    if (travelling_[layer_of(m)] == 0) continue;
    double at = now_.starts[m];
    for (const std::size_t i : by_layer_[layer_of(m)]) {
      if (placements[i] == Placement::kDdr) needed_.push_back(at);
      if (placements[i] == Placement::kRecompute)
        at = std::min(at + snapshot_.sites[i].recompute_seconds, now_.starts[m + 1]);
    }
  }
}

// As late as each can start and still be back when it is asked for, so that HBM is held for the shortest
// time; in whole moments, since that is when the session submits. One that came late before starts earlier.
bool Windows::choose_triggers() {
  auto& trips = now_.trips;
  double free = now_.starts.back();
  std::size_t moment = moments_.size() - 1;
  for (std::size_t k = trips.size(); k-- > 0;) {
    Timeline::Trip& trip = trips[k];
    const SiteCost& site = snapshot_.sites[trip.site];
    const double end = std::min(needed_[k], free);
    free = end - restore_seconds(end, trip.bytes);
    moment = std::min(moment, trip.own);
    while (moment > now_.head && now_.starts[moment] > free) --moment;
    const auto lead = static_cast<std::size_t>(std::clamp(site.lateness, 0, kMostLead));
    moment = std::max(now_.head, moment - std::min(moment, lead));
    trip.trigger = moment;
    if (trip.departure > moment) return false;
    // Its own bytes take the place of those computed again; packed ones are beside them.
    const bool packed = trip.bytes != site.bytes;
    hold(moment, packed ? trip.own + 1 : trip.own, trip.bytes);
  }
  return true;
}

// What really happens then: restores follow one another from their triggers on, and whoever comes late is
// waited for.
void Windows::restore_in_time(const std::vector<Placement>& placements) {
  double free = 0;
  double delay = 0;
  auto trip = now_.trips.begin();
  for (std::size_t m = now_.head; m < moments_.size(); ++m) {
    const double window = now_.starts[m + 1] - now_.starts[m];
    double at = now_.starts[m] + delay;
    now_.starts[m] = at;
    double end = at + window;
    if (!is(m, Moment::Phase::kBackward) || travelling_[layer_of(m)] == 0) continue;
    for (const std::size_t i : by_layer_[layer_of(m)]) {
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

Bytes Windows::peak_at(std::size_t moment) const {
  switch (moments_[moment].phase) {
    case Moment::Phase::kForward:
      return snapshot_.layers[layer_of(moment)].forward_peak;
    case Moment::Phase::kHead:
      return std::max(snapshot_.head.forward_peak, snapshot_.head.backward_peak);
    case Moment::Phase::kBackward:
      break;
  }
  return snapshot_.layers[layer_of(moment)].backward_peak;
}

bool Windows::fits(const std::vector<Placement>& placements) {
  for (const std::size_t m : forwards_) {
    for (const std::size_t i : by_layer_[layer_of(m)])
      if (placements[i] == Placement::kHbm) hold(m, backward_[m], snapshot_.sites[i].bytes);
  }
  std::uint64_t held = 0;
  now_.hbm.resize(moments_.size());
  for (std::size_t m = 0; m < moments_.size(); ++m) {
    held += enter_[m];
    held -= leave_[m];
    now_.hbm[m] = peak_at(m) + Bytes(held);
    if (held > 0 && now_.hbm[m] > snapshot_.hbm_budget) return false;
  }
  return true;
}

const Timeline* Windows::simulate(const std::vector<Placement>& placements) {
  if (!count(placements)) return nullptr;
  enter_.assign(moments_.size() + 1, 0);
  leave_.assign(moments_.size() + 1, 0);
  start_moments();
  make_room_for_trips();
  spill(placements);
  note_needs(placements);
  if (!choose_triggers() || !fits(placements)) return nullptr;
  restore_in_time(placements);
  return &now_;
}

}  // namespace terrace
