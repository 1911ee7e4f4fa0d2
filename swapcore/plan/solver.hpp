// Decides which site outputs are kept in HBM, which travel to DDR and back, and which are computed again.
//
// A pure function: no clock, no device, no lock. docs/design/0004-plan.md has the model and its limits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/units.hpp"
#include "swapcore/plan/prediction.hpp"
#include "swapcore/policy/policy.hpp"
#include "swapcore/site.hpp"

namespace terrace {

enum class Placement : std::uint8_t { kRecompute = 0, kHbm = 1, kDdr = 2 };
[[nodiscard]] const char* name_of(Placement placement);

// One site of one layer: a whole instance; parts of one are never cached.
struct SiteCost {
  SiteId site;
  int layer = 0;
  Bytes bytes;                   // of its output; zero: never offered, never cached
  double recompute_seconds = 0;  // measured
  RuleAction rule = RuleAction::kAuto;
  // How often its restore came late, and how often it had not left when it was to be gone. Each time the one
  // starts and the other is due a position earlier or later; past kMostLead it stays at home.
  int lateness = 0, delay = 0;
  double ready_seconds = 0;  // measured: when it is there, since its layer's forward began; zero: not known
  Bytes travel_bytes{};      // what of it crosses the link and lies in DDR; zero: all its bytes, as they are
};
[[nodiscard]] inline Bytes travelling(const SiteCost& site) {
  return site.travel_bytes == 0_B ? site.bytes : site.travel_bytes;
}
inline constexpr int kMostLead = 3;

// A position in time: the forward and backward of one layer, or the head between them.
struct Position {
  double forward_seconds = 0;         // the window in which outputs can leave
  double backward_seconds = 0;        // recomputation included; for the head, the same as forward
  Bytes forward_peak, backward_peak;  // most HBM in use there while nothing is cached
};

// What a step does at one time: a layer's pass, or the head.
struct Moment {
  enum class Phase : std::uint8_t { kForward, kHead, kBackward } phase = Phase::kForward;
  int layer = 0;  // of kForward and kBackward
  std::uint32_t micro_batch = 0;
};

// A place in DDR with a limit of its own: a NUMA node.
struct DdrNode {
  int node = 0;  // the operating system's number
  Bytes limit;   // the most that cached outputs may hold there at one time
};

// Sites of a layer are in the order in which forward has them and backward asks for them, where ready_seconds
// does not tell.
struct Snapshot {
  std::vector<SiteCost> sites;
  std::vector<Position> layers;  // in forward order
  Position head;
  // The order of a step's moments. Empty: each micro-batch passes forward of all layers, the head, and
  // backward of all in reverse, before the next begins. Else any order, in which the backward of a layer and
  // micro-batch comes behind its forward, both once: a pipeline's one forward one backward, or interleaved
  // stages.
  std::vector<Moment> schedule;
  int micro_batches = 1;     // where the schedule is empty
  double other_seconds = 0;  // of a step, outside of every position
  Bytes other_peak;          // most HBM in use there
  Bytes hbm_budget;          // of the device
  Bytes hbm_cache_limit;     // the most that outputs which stay may hold in HBM at one time
  Bytes ddr_cache_limit;     // the same in DDR
  // By node, nearest first; each output lies on one of them. Empty: one, of that limit.
  std::vector<DdrNode> ddr_nodes;
  double d2h_bytes_per_second = 0;
  double h2d_bytes_per_second = 0;
  double both_bytes_per_second = 0;  // of the two directions together; zero: they do not disturb each other
};

struct Plan {
  std::vector<Placement> placements;                       // as Snapshot::sites
  int hbm_sites = 0, ddr_sites = 0, recomputed_sites = 0;  // of those that are offered at all
  Bytes hbm_bytes, ddr_bytes;                              // held at the end of forward
  double saved_seconds = 0;                                // of recomputation, per micro-batch
  double recompute_seconds = 0;                            // what is left of it
  std::vector<int> nodes;  // as Snapshot::sites: the NUMA node of those in DDR, -1 of the others and where
                           // none is named
  // By moment (those of Prediction), on entering it: what has left HBM by then, in the order in which it
  // left; what to bring back, in order of use. Where the schedule is empty, of each micro-batch alike.
  std::vector<std::vector<SiteKey>> departures, restores;
  Prediction prediction;
};

// Never exceeds a limit of the snapshot, never predicts a longer step than full recomputation where no rule
// asks for it; the same snapshot gives the same plan.
[[nodiscard]] Plan solve(const Snapshot& snapshot, const Policy& policy);

}  // namespace terrace
