// What a plan promises, by seed: played out step by step by a simulator that shares nothing with the solver.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "swapcore/plan/solver.hpp"

namespace terrace {
namespace {

std::uint64_t below(std::mt19937& random, std::uint64_t end) { return random() % end; }

// Some kinds of site, each in every layer or in every third; windows that vary; a link from useless to fast.
Snapshot random_snapshot(unsigned seed, int most_layers, int most_kinds) {
  std::mt19937 random(seed);
  Snapshot snapshot;
  const int layers = 1 + static_cast<int>(below(random, static_cast<std::uint64_t>(most_layers)));
  const int kinds = 1 + static_cast<int>(below(random, static_cast<std::uint64_t>(most_kinds)));
  struct Kind {
    Bytes bytes;
    double seconds;
    int every;
  };
  std::vector<Kind> of_kind;
  for (int k = 0; k < kinds; ++k) {
    of_kind.push_back({Bytes(1 + below(random, 4 << 20)), 1e-6 * static_cast<double>(below(random, 3000)),
                       below(random, 3) == 0 ? 3 : 1});
  }
  for (int l = 0; l < layers; ++l) {
    double recompute = 0;
    for (const Kind& kind : of_kind) {
      if (l % kind.every != 0) continue;
      const auto index = static_cast<std::uint32_t>(snapshot.sites.size());
      snapshot.sites.push_back({SiteId{index}, l, kind.bytes, kind.seconds, RuleAction::kAuto});
      recompute += kind.seconds;
    }
    snapshot.layers.push_back(
        {.forward_seconds = recompute + 1e-6 * static_cast<double>(below(random, 500)),
         .backward_seconds = 3 * recompute + 1e-6 * static_cast<double>(below(random, 500)),
         .forward_peak = Bytes(below(random, 30 << 20)),
         .backward_peak = Bytes(below(random, 60 << 20))});
  }
  snapshot.head.forward_seconds = snapshot.head.backward_seconds =
      1e-6 * static_cast<double>(below(random, 4000));
  snapshot.head.forward_peak = snapshot.head.backward_peak = Bytes(below(random, 60 << 20));
  snapshot.hbm_budget = Bytes((20 << 20) + below(random, 80 << 20));
  snapshot.hbm_cache_limit = Bytes(below(random, 80 << 20));
  snapshot.ddr_cache_limit = Bytes(below(random, 120 << 20));
  snapshot.d2h_bytes_per_second = 1e6 * static_cast<double>(below(random, 4000));
  snapshot.h2d_bytes_per_second = 1e6 * static_cast<double>(below(random, 4000));
  if (below(random, 2) == 0)
    snapshot.both_bytes_per_second = 0.8 * (snapshot.d2h_bytes_per_second + snapshot.h2d_bytes_per_second);
  return snapshot;
}

double full_recomputation(const Snapshot& snapshot) {
  double seconds = snapshot.head.forward_seconds;
  for (const Position& position : snapshot.layers)
    seconds += position.forward_seconds + position.backward_seconds;
  return seconds;
}

// A session on paper: copies in queues, compute in order, at the full rates of the link.
class Player {
 public:
  Player(const Snapshot& snapshot, const Plan& plan) : snapshot_(snapshot), plan_(plan) {
    left_.resize(snapshot.sites.size());
    back_.resize(snapshot.sites.size());
  }

  // The seconds it takes; failures name the seed.
  double play(unsigned seed) {
    seed_ = seed;
    const int layers = static_cast<int>(snapshot_.layers.size());
    for (int l = 0; l < layers; ++l) forward(l);
    depart_and_restore(snapshot_.layers.size());
    at_position(-1, snapshot_.head.forward_peak);
    now_ += snapshot_.head.forward_seconds;
    for (int l = layers; l-- > 0;) {
      depart_and_restore(static_cast<std::size_t>(2 * layers - l));
      backward(l);
    }
    return now_;
  }

 private:
  template <typename Each>
  void of_layer(int layer, Each each) {
    for (std::size_t i = 0; i < snapshot_.sites.size(); ++i)
      if (snapshot_.sites[i].layer == layer) each(i, snapshot_.sites[i]);
  }

  void forward(int layer) {
    depart(static_cast<std::size_t>(layer));
    const double end = now_ + snapshot_.layers[static_cast<std::size_t>(layer)].forward_seconds;
    of_layer(layer, [&](std::size_t i, const SiteCost& site) {
      now_ = std::min(end, now_ + site.recompute_seconds);
      if (plan_.placements[i] == Placement::kHbm) {
        kept_ += site.bytes;
        held_.push_back({i});
      }
      if (plan_.placements[i] != Placement::kDdr) return;
      ddr_ += site.bytes;
      out_free_ = std::max(out_free_, now_) + static_cast<double>(site.bytes.count()) / out_rate();
      left_[i] = out_free_;
      held_.push_back({i});
    });
    EXPECT_LE(kept_, snapshot_.hbm_cache_limit) << seed_;
    EXPECT_LE(ddr_, snapshot_.ddr_cache_limit) << seed_;
    now_ = end;
    at_position(-1, snapshot_.layers[static_cast<std::size_t>(layer)].forward_peak);
  }

  void depart(std::size_t moment) {
    for (const auto& [id, micro_batch] : plan_.departures[moment]) {
      EXPECT_LE(left_[id.index], now_ + 1e-12) << seed_ << ": gives up its place before it has left";
      EXPECT_EQ(std::erase_if(held_, [index = id.index](const Held& held) { return held.site == index; }), 1U)
          << seed_;
    }
  }

  void depart_and_restore(std::size_t moment) {
    depart(moment);
    for (const auto& [id, micro_batch] : plan_.restores[moment]) {
      const SiteCost& site = snapshot_.sites[id.index];
      EXPECT_EQ(plan_.placements[id.index], Placement::kDdr) << seed_;
      EXPECT_LE(left_[id.index], now_ + 1e-12) << seed_ << ": asked back before it has left";
      in_free_ = std::max(in_free_, now_) + static_cast<double>(site.bytes.count()) / in_rate();
      back_[id.index] = in_free_;
      held_.push_back({id.index});
    }
  }

  void backward(int layer) {
    const Position& position = snapshot_.layers[static_cast<std::size_t>(layer)];
    const double begin = now_;
    double saved = 0;
    of_layer(layer, [&](std::size_t i, const SiteCost& site) {
      if (plan_.placements[i] == Placement::kRecompute) {
        now_ += site.recompute_seconds;
        return;
      }
      saved += site.recompute_seconds;
      if (plan_.placements[i] != Placement::kDdr) return;
      EXPECT_GT(back_[i], 0) << seed_ << ": never brought back";
      waited_ += std::max(0.0, back_[i] - now_);
      now_ = std::max(now_, back_[i]);
    });
    double waited = now_ - begin;
    of_layer(layer, [&](std::size_t i, const SiteCost& site) {
      if (plan_.placements[i] == Placement::kRecompute) waited -= site.recompute_seconds;
    });
    now_ = begin + waited + std::max(0.0, position.backward_seconds - saved);
    at_position(layer, position.backward_peak);
    std::erase_if(held_, [&](const Held& held) { return snapshot_.sites[held.site].layer == layer; });
  }

  // What entries held at any time between the two, and those of the layer itself in place of recomputed ones.
  void at_position(int own, Bytes base) {
    Bytes held;
    for (const Held& entry : held_) {
      if (snapshot_.sites[entry.site].layer == own) continue;
      held += snapshot_.sites[entry.site].bytes;
    }
    if (held > 0_B) {
      EXPECT_LE(base + held, snapshot_.hbm_budget) << seed_;
    }
  }

  // The slower of what both directions get at one time: a plan may not count on more.
  [[nodiscard]] double out_rate() const { return snapshot_.d2h_bytes_per_second; }
  [[nodiscard]] double in_rate() const {
    const double half = snapshot_.both_bytes_per_second / 2;
    return half > 0 && out_free_ > now_ ? std::min(half, snapshot_.h2d_bytes_per_second)
                                        : snapshot_.h2d_bytes_per_second;
  }

  struct Held {
    std::size_t site;
  };
  const Snapshot& snapshot_;
  const Plan& plan_;
  unsigned seed_ = 0;
  double now_ = 0, out_free_ = 0, in_free_ = 0, waited_ = 0;
  std::vector<double> left_, back_;
  std::vector<Held> held_;
  Bytes kept_, ddr_;
};

TEST(SolverProperties, PlayedOutNoLimitIsExceededAndTheStepIsAsShortAsPredicted) {
  int with_trips = 0;
  for (unsigned seed = 0; seed < 1000; ++seed) {
    const Snapshot snapshot = random_snapshot(seed, 12, 6);
    const Plan plan = solve(snapshot, Policy{});
    with_trips += plan.ddr_sites > 0 ? 1 : 0;
    const double played = Player(snapshot, plan).play(seed);
    EXPECT_LE(played, plan.prediction.step_seconds * 1.001 + 1e-9) << seed;
    EXPECT_GE(played, (plan.prediction.step_seconds - plan.prediction.stall_seconds) * 0.999) << seed;
    EXPECT_LE(plan.prediction.step_seconds, full_recomputation(snapshot) + 1e-9) << seed;
    if (HasFailure()) return;
  }
  EXPECT_GT(with_trips, 300);
}

TEST(SolverProperties, TheSameSnapshotGivesTheSamePlan) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    const Snapshot snapshot = random_snapshot(seed, 12, 6);
    EXPECT_EQ(solve(snapshot, Policy{}).placements, solve(snapshot, Policy{}).placements);
  }
}

TEST(SolverProperties, ALargerBudgetIsNeverWorse) {
  for (unsigned seed = 0; seed < 80; ++seed) {
    Snapshot snapshot = random_snapshot(seed, 12, 6);
    snapshot.hbm_cache_limit = 1_GiB;
    double before = full_recomputation(snapshot);
    for (int mib = 20; mib <= 160; mib += 10) {
      snapshot.hbm_budget = Bytes(static_cast<std::uint64_t>(mib) << 20);
      const double seconds = solve(snapshot, Policy{}).prediction.step_seconds;
      EXPECT_LE(seconds, before * 1.005) << "seed " << seed << " at " << mib << " MiB";
      before = std::min(before, seconds);
    }
  }
}

// The shortest step that any placements of a tiny snapshot allow. Each is tried as rules that the solver has
// to follow; it refuses some, and then another of the trials has what it chose instead.
double shortest_of_all(Snapshot snapshot) {
  double best = full_recomputation(snapshot);
  std::size_t trials = 1;
  for (std::size_t i = 0; i < snapshot.sites.size(); ++i) trials *= 3;
  constexpr RuleAction kActions[] = {RuleAction::kDiscard, RuleAction::kHbm, RuleAction::kDdr};
  for (std::size_t trial = 0; trial < trials; ++trial) {
    std::size_t digits = trial;
    for (SiteCost& site : snapshot.sites) {
      site.rule = kActions[digits % 3];
      digits /= 3;
    }
    best = std::min(best, solve(snapshot, Policy{}).prediction.step_seconds);
  }
  return best;
}

TEST(SolverProperties, NearTheBestOfAllPlacements) {
  int tried = 0;
  for (unsigned seed = 0; tried < 60; ++seed) {
    const Snapshot snapshot = random_snapshot(seed, 4, 3);
    if (snapshot.sites.size() < 3 || snapshot.sites.size() > 7) continue;
    ++tried;
    EXPECT_LE(solve(snapshot, Policy{}).prediction.step_seconds, 1.02 * shortest_of_all(snapshot)) << seed;
  }
}

}  // namespace
}  // namespace terrace
