#include "swapcore/plan/solver.hpp"

#include <algorithm>

#include "swapcore/plan/windows.hpp"

namespace terrace {
namespace {

// Waiting that is planned counts twice: it is the first thing to grow where a measured window varies.
constexpr double kStallWeight = 2;
// Gains below this are noise of the arithmetic.
constexpr double kLeastGain = 1e-9;
// What the improvements may cost: time lines tried, times sites. A tenth of a second or two.
constexpr std::size_t kMostWork = 4'000'000, kMostTries = 20'000;
constexpr int kRefusals = 6;
constexpr int kSeconds = 32;  // candidates for the second of two that take the place of one

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
      return placement == Placement::kRecompute;
    case RuleAction::kAuto:
      return placement == Placement::kRecompute ||
             (mode == SwapMode::kAuto &&
              (placement == Placement::kHbm || std::max(site.lateness, site.delay) <= kMostLead));
  }
  return false;
}

// Sites that are worth a place, densest first; instances of one (block type, site) are neighbours, the later
// layer first.
std::vector<std::size_t> order_of(const std::vector<SiteCost>& sites) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < sites.size(); ++i) {
    if (sites[i].bytes > 0_B && sites[i].recompute_seconds > 0 && sites[i].rule == RuleAction::kAuto)
      order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const double density_a = density(sites[a]);
    const double density_b = density(sites[b]);
    if (density_a != density_b) return density_a > density_b;
    if (sites[a].bytes != sites[b].bytes) return sites[a].bytes > sites[b].bytes;
    return sites[a].layer > sites[b].layer;
  });
  return order;
}

// Placements under way, always such that every limit holds.
class Search {
 public:
  Search(Windows& windows, SwapMode mode)
      : windows_(windows), mode_(mode), placements_(sites().size(), Placement::kRecompute) {
    cost_ = *try_cost();  // nothing is cached: no limit is asked
  }

  void place_named() {
    for (std::size_t i = 0; i < sites().size(); ++i) {
      if (sites()[i].bytes == 0_B) continue;
      if (sites()[i].rule == RuleAction::kHbm) place_named(i, Placement::kHbm);
      if (sites()[i].rule == RuleAction::kDdr) place_named(i, Placement::kDdr);
    }
  }

  // One kind of instance after the other, densest first: the first place takes what it holds, then the
  // second. HBM takes the late layers, which are asked for first; DDR the early ones, which have the longest
  // time to travel.
  void fill(const std::vector<std::size_t>& order, Placement first, Placement second) {
    for (std::size_t begin = 0; begin < order.size();) {
      std::size_t end = begin + 1;
      while (end < order.size() && same_kind(order[begin], order[end])) ++end;
      std::vector<std::size_t> kind(order.begin() + static_cast<std::ptrdiff_t>(begin),
                                    order.begin() + static_cast<std::ptrdiff_t>(end));
      for (const Placement placement : {first, second}) {
        if (placement == Placement::kRecompute) continue;
        std::sort(kind.begin(), kind.end(), [&](std::size_t a, std::size_t b) {
          return placement == Placement::kHbm ? sites()[a].layer > sites()[b].layer
                                              : sites()[a].layer < sites()[b].layer;
        });
        fill_kind(kind, placement);
      }
      begin = end;
    }
  }

  // Exchanges between instances, until none makes the step shorter.
  void improve(const std::vector<std::size_t>& order) {
    std::size_t tries = std::min(kMostTries, kMostWork / std::max<std::size_t>(1, sites().size()));
    bool better = true;
    while (better && tries > 0) {
      better = false;
      for (const std::size_t out : order) {
        if (placements_[out] != Placement::kRecompute) continue;
        if (improve_one(order, out, tries) || move_out_for(order, out, tries)) better = true;
      }
    }
  }

  [[nodiscard]] double cost() const { return cost_; }
  [[nodiscard]] const std::vector<Placement>& placements() const { return placements_; }

 private:
  [[nodiscard]] const std::vector<SiteCost>& sites() const { return windows_.snapshot().sites; }
  [[nodiscard]] bool same_kind(std::size_t a, std::size_t b) const {
    return sites()[a].bytes == sites()[b].bytes &&
           sites()[a].recompute_seconds == sites()[b].recompute_seconds;
  }

  std::optional<double> try_cost() {
    const Timeline* timeline = windows_.simulate(placements_);
    if (timeline == nullptr) return std::nullopt;
    return timeline->seconds + (kStallWeight - 1) * timeline->stall_seconds;
  }
  // Whether the placements as they are now fit and are better than those before.
  bool accept() {
    const auto cost = try_cost();
    if (!cost || *cost > cost_ - kLeastGain) return false;
    cost_ = *cost;
    return true;
  }

  void place_named(std::size_t site, Placement placement) {
    placements_[site] = placement;
    if (const auto cost = try_cost()) {
      cost_ = *cost;
    } else {
      placements_[site] = Placement::kRecompute;
    }
  }

  // The longest runs that fit, by halving and doubling; an instance that stops one is left out. Layers are
  // much alike: after some refusals in a row the kind has had its share.
  void fill_kind(const std::vector<std::size_t>& kind, Placement placement) {
    std::vector<std::size_t> open;
    for (const std::size_t i : kind) {
      if (placements_[i] == Placement::kRecompute && may_use(sites()[i], placement, mode_)) open.push_back(i);
    }
    const auto take = [&](std::size_t begin, std::size_t end) {
      for (std::size_t k = begin; k < end; ++k) placements_[open[k]] = placement;
      if (accept()) return true;
      for (std::size_t k = begin; k < end; ++k) placements_[open[k]] = Placement::kRecompute;
      return false;
    };
    std::size_t step = open.size();
    int refused = 0;
    for (std::size_t begin = 0; begin < open.size() && refused < kRefusals;) {
      step = std::clamp<std::size_t>(step, 1, open.size() - begin);
      if (take(begin, begin + step)) {
        begin += step;
        step *= 2;
        refused = 0;
      } else if (step > 1) {
        step /= 2;
      } else {
        ++begin;
        ++refused;
      }
    }
  }

  // A place for an instance that is computed again: a free one; or that of another which goes the other way
  // or is computed again itself.
  bool improve_one(const std::vector<std::size_t>& order, std::size_t site, std::size_t& tries) {
    for (const Placement placement : {Placement::kHbm, Placement::kDdr}) {
      if (!may_use(sites()[site], placement, mode_)) continue;
      if (try_move(site, placement, tries)) return true;
      for (auto other = order.rbegin(); other != order.rend() && tries > 0; ++other) {
        const Placement before = placements_[*other];
        if (*other == site || before == Placement::kRecompute || same_kind_and_layer(*other, site)) continue;
        const Placement across = before == Placement::kHbm ? Placement::kDdr : Placement::kHbm;
        for (const Placement after : {across, Placement::kRecompute}) {
          if (!may_use(sites()[*other], after, mode_)) continue;
          placements_[*other] = after;
          if (try_move(site, placement, tries)) return true;
          if (after == Placement::kRecompute && try_two(order, site, placement, tries)) return true;
          placements_[*other] = before;
        }
      }
    }
    return false;
  }
  // As many others to DDR as it takes, as long as that costs nothing: early layers, which can best travel,
  // first.
  bool move_out_for(const std::vector<std::size_t>& order, std::size_t site, std::size_t& tries) {
    if (!may_use(sites()[site], Placement::kHbm, mode_)) return false;
    const auto before = placements_;
    std::vector<std::size_t> others;
    for (const std::size_t other : order) {
      if (placements_[other] == Placement::kHbm && may_use(sites()[other], Placement::kDdr, mode_))
        others.push_back(other);
    }
    std::stable_sort(others.begin(), others.end(),
                     [this](std::size_t a, std::size_t b) { return sites()[a].layer < sites()[b].layer; });
    for (const std::size_t other : others) {
      if (tries == 0) break;
      --tries;
      placements_[other] = Placement::kDdr;
      const auto cost = try_cost();
      if (!cost || *cost > cost_ + kLeastGain) {
        placements_[other] = Placement::kHbm;
        continue;
      }
      if (try_move(site, Placement::kHbm, tries)) return true;
    }
    placements_ = before;
    return false;
  }
  [[nodiscard]] bool same_kind_and_layer(std::size_t a, std::size_t b) const {
    return same_kind(a, b) && sites()[a].layer == sites()[b].layer;
  }
  // With the instance itself another one of the same kind of place: two small ones for one large.
  bool try_two(const std::vector<std::size_t>& order, std::size_t site, Placement placement,
               std::size_t& tries) {
    placements_[site] = placement;
    int others = 0;
    for (const std::size_t second : order) {
      if (placements_[second] != Placement::kRecompute || others == kSeconds) continue;
      ++others;
      for (const Placement place : {Placement::kHbm, Placement::kDdr}) {
        if (may_use(sites()[second], place, mode_) && try_move(second, place, tries)) return true;
      }
    }
    placements_[site] = Placement::kRecompute;
    return false;
  }
  bool try_move(std::size_t site, Placement placement, std::size_t& tries) {
    if (tries == 0) return false;
    --tries;
    const Placement before = placements_[site];
    placements_[site] = placement;
    if (accept()) return true;
    placements_[site] = before;
    return false;
  }

  Windows& windows_;
  SwapMode mode_;
  std::vector<Placement> placements_;
  double cost_ = 0;
};

// The best of several ways to fill, improved.
std::vector<Placement> search(Windows& windows, SwapMode mode) {
  const auto order = order_of(windows.snapshot().sites);
  Search start(windows, mode);
  start.place_named();
  if (mode != SwapMode::kAuto) return start.placements();
  std::optional<Search> best;
  const auto consider = [&](auto... passes) {
    Search candidate = start;
    (candidate.fill(order, passes.first, passes.second), ...);
    if (!best || candidate.cost() < best->cost() - kLeastGain) best.emplace(std::move(candidate));
  };
  using Pass = std::pair<Placement, Placement>;
  consider(Pass{Placement::kHbm, Placement::kDdr});
  consider(Pass{Placement::kDdr, Placement::kHbm});
  consider(Pass{Placement::kHbm, Placement::kRecompute}, Pass{Placement::kDdr, Placement::kRecompute});
  consider(Pass{Placement::kDdr, Placement::kRecompute}, Pass{Placement::kHbm, Placement::kRecompute});
  best->improve(order);
  return best->placements();
}

void count(const Snapshot& snapshot, Plan& plan) {
  for (std::size_t i = 0; i < snapshot.sites.size(); ++i) {
    const SiteCost& site = snapshot.sites[i];
    if (site.bytes == 0_B) continue;
    switch (plan.placements[i]) {
      case Placement::kRecompute:
        ++plan.recomputed_sites;
        plan.recompute_seconds += site.recompute_seconds;
        continue;
      case Placement::kHbm:
        ++plan.hbm_sites;
        plan.hbm_bytes += site.bytes;
        break;
      case Placement::kDdr:
        ++plan.ddr_sites;
        plan.ddr_bytes += travelling(site);
        break;
    }
    plan.saved_seconds += site.recompute_seconds;
  }
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
  Plan plan;
  plan.placements.assign(snapshot.sites.size(), Placement::kRecompute);
  Windows windows(snapshot);
  if (policy.swapcore.mode != SwapMode::kOff) plan.placements = search(windows, policy.swapcore.mode);
  count(snapshot, plan);
  const Timeline& timeline = *windows.simulate(plan.placements);
  plan.nodes = windows.nodes();
  plan.departures.resize(timeline.hbm.size());
  plan.restores.resize(timeline.hbm.size());
  auto trips = timeline.trips;
  for (const Timeline::Trip& trip : trips)
    plan.restores[trip.trigger].push_back({snapshot.sites[trip.site].site, trip.micro_batch});
  std::stable_sort(trips.begin(), trips.end(),
                   [](const auto& a, const auto& b) { return a.spill_start < b.spill_start; });
  for (const Timeline::Trip& trip : trips)
    plan.departures[trip.departure].push_back({snapshot.sites[trip.site].site, trip.micro_batch});
  plan.prediction = predict(snapshot, timeline);
  return plan;
}

}  // namespace terrace
