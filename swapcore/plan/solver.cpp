#include "swapcore/plan/solver.hpp"

#include <algorithm>

namespace terrace {
namespace {

// The part of a window that copies may fill: measured windows vary, and a late restore costs more than a
// missed one.
constexpr double kWindowShare = 0.85;

// What is left of each limit while instances are placed. Position n is the backward of layer n; the last is
// the head.
class Room {
 public:
  explicit Room(const Snapshot& snapshot)
      : hbm_left_(snapshot.hbm_cache_limit), ddr_left_(snapshot.ddr_cache_limit) {
    for (std::size_t i = 0; i <= snapshot.layers.size(); ++i) {
      const Position& position = i < snapshot.layers.size() ? snapshot.layers[i] : snapshot.head;
      hbm_.push_back(saturating_sub(snapshot.hbm_budget, position.hbm_peak));
      d2h_.push_back(position.forward_seconds * snapshot.d2h_bytes_per_second * kWindowShare);
      h2d_.push_back(position.backward_seconds * snapshot.h2d_bytes_per_second * kWindowShare);
    }
    h2d_rate_ = snapshot.h2d_bytes_per_second * kWindowShare;
  }

  // An output kept in HBM is held at every position between its forward and its backward.
  bool place_in_hbm(const SiteCost& site) {
    const auto first = static_cast<std::size_t>(site.layer) + 1;
    if (site.bytes > hbm_left_) return false;
    if (std::any_of(hbm_.begin() + first, hbm_.end(), [&](Bytes room) { return room < site.bytes; }))
      return false;
    std::for_each(hbm_.begin() + first, hbm_.end(), [&](Bytes& room) { room -= site.bytes; });
    hbm_left_ -= site.bytes;
    shorten_backward(site);
    return true;
  }

  // One that travels is in HBM only next to its own layer: leaving during the next forward, returning during
  // the backward before its own. Both must fit the link's idle time there.
  bool place_in_ddr(const SiteCost& site) {
    const auto next = static_cast<std::size_t>(site.layer) + 1;
    const auto bytes = static_cast<double>(site.bytes.count());
    if (site.bytes > ddr_left_ || hbm_[next] < site.bytes || d2h_[next] < bytes || h2d_[next] < bytes)
      return false;
    hbm_[next] -= site.bytes;
    d2h_[next] -= bytes;
    h2d_[next] -= bytes;
    ddr_left_ -= site.bytes;
    shorten_backward(site);
    return true;
  }

 private:
  // What is not computed again also shortens the window in which the layer before could be restored.
  void shorten_backward(const SiteCost& site) {
    h2d_[static_cast<std::size_t>(site.layer)] -= site.recompute_seconds * h2d_rate_;
  }

  std::vector<Bytes> hbm_;
  std::vector<double> d2h_, h2d_;
  Bytes hbm_left_, ddr_left_;
  double h2d_rate_ = 0;
};

double density(const SiteCost& site) {
  return site.recompute_seconds / static_cast<double>(site.bytes.count());
}

bool may_use(const SiteCost& site, Placement placement, SwapMode mode) {
  switch (site.rule) {
    case RuleAction::kHbm:
      return placement == Placement::kHbm;
    case RuleAction::kDdr:
      return placement == Placement::kDdr;
    case RuleAction::kDiscard:
      return false;
    case RuleAction::kAuto:
      return mode == SwapMode::kAuto;
  }
  return false;
}

// Densest first; of equals the later layer, which is held for the shorter time; rules before what is free to
// choose.
std::vector<std::size_t> order_of(const std::vector<SiteCost>& sites) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    if (sites[i].bytes > 0_B) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const bool named_a = sites[a].rule != RuleAction::kAuto;
    const bool named_b = sites[b].rule != RuleAction::kAuto;
    if (named_a != named_b) return named_a;
    const double density_a = density(sites[a]);
    const double density_b = density(sites[b]);
    if (density_a != density_b) return density_a > density_b;
    return sites[a].layer > sites[b].layer;
  });
  return order;
}

}  // namespace

const char* name_of(Placement placement) {
  switch (placement) {
    case Placement::kRecompute:
      return "recompute";
    case Placement::kHbm:
      return "hbm";
    case Placement::kDdr:
      return "ddr";
  }
  return "?";
}

Plan solve(const Snapshot& snapshot, const Policy& policy) {
  const auto& sites = snapshot.sites;
  Plan plan;
  plan.placements.assign(sites.size(), Placement::kRecompute);
  for (const SiteCost& site : sites) {
    if (site.bytes == 0_B) continue;
    plan.recompute_seconds += site.recompute_seconds;
    ++plan.recomputed_sites;
  }
  if (policy.swapcore.mode == SwapMode::kOff) return plan;

  Room room(snapshot);
  const auto order = order_of(sites);
  const auto pass = [&](Placement placement, auto place) {
    for (std::size_t i : order) {
      if (plan.placements[i] != Placement::kRecompute) continue;
      if (!may_use(sites[i], placement, policy.swapcore.mode) || !place(sites[i])) continue;
      plan.placements[i] = placement;
      (placement == Placement::kHbm ? plan.hbm_bytes : plan.ddr_bytes) += sites[i].bytes;
      ++(placement == Placement::kHbm ? plan.hbm_sites : plan.ddr_sites);
      --plan.recomputed_sites;
      plan.saved_seconds += sites[i].recompute_seconds;
      plan.recompute_seconds -= sites[i].recompute_seconds;
    }
  };
  pass(Placement::kHbm, [&](const SiteCost& site) { return room.place_in_hbm(site); });
  pass(Placement::kDdr, [&](const SiteCost& site) { return room.place_in_ddr(site); });
  return plan;
}

}  // namespace terrace
