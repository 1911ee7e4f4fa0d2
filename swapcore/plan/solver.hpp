// Decides which site outputs are kept in HBM, which travel to DDR and back, and which are computed again.
//
// A pure function: no clock, no device, no lock. docs/design/0004-plan.md has the model and its limits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/units.hpp"
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
};

// A position in time: the forward and backward of one layer, or the head between them.
struct Position {
  double forward_seconds = 0;   // the window in which earlier outputs can leave
  double backward_seconds = 0;  // recomputation included; the window in which the next layer's can return
  Bytes hbm_peak;               // most HBM in use there while nothing is cached
};

struct Snapshot {
  std::vector<SiteCost> sites;
  std::vector<Position> layers;  // in forward order
  Position head;
  Bytes hbm_budget;       // of the device
  Bytes hbm_cache_limit;  // the most that outputs may hold in HBM at one time
  Bytes ddr_cache_limit;  // the same in DDR
  double d2h_bytes_per_second = 0;
  double h2d_bytes_per_second = 0;
};

struct Plan {
  std::vector<Placement> placements;                       // as Snapshot::sites
  int hbm_sites = 0, ddr_sites = 0, recomputed_sites = 0;  // of those that are offered at all
  Bytes hbm_bytes, ddr_bytes;                              // held at the end of forward
  double saved_seconds = 0;                                // of recomputation, per micro-batch
  double recompute_seconds = 0;                            // what is left of it
};

// Greedy by recompute time per byte: O(n log n + n * layers). Never exceeds a limit of the snapshot.
[[nodiscard]] Plan solve(const Snapshot& snapshot, const Policy& policy);

}  // namespace terrace
