// A micro-batch in time, under given placements: when each output leaves, is back, is asked for; what HBM
// holds meanwhile. docs/design/0004-plan.md has the model.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "swapcore/plan/solver.hpp"

namespace terrace {

// Times are seconds since the micro-batch began; moments are those of Prediction.
struct Timeline {
  struct Trip {
    std::size_t site = 0;       // as Snapshot::sites
    std::size_t departure = 0;  // the moment at whose start it holds no HBM any more
    std::size_t trigger = 0;    // the moment at whose start its restore is submitted
    Bytes bytes;
    double spill_start = 0, spill_end = 0, restore_start = 0, restore_end = 0;
  };
  double seconds = 0;          // stalls included
  double stall_seconds = 0;    // of them, waiting for restores
  std::vector<double> starts;  // of each moment, and the end of the last
  std::vector<Bytes> hbm;      // most in use at each moment, at most
  Bytes ddr;                   // most held by cached outputs
  std::vector<Trip> trips;     // in order of use
};

class Windows {
 public:
  explicit Windows(const Snapshot& snapshot);

  // Nothing where a limit of the snapshot would be exceeded, or an output asked back before it has left.
  // O(sites + layers). The reference is good until the next call.
  [[nodiscard]] const Timeline* simulate(const std::vector<Placement>& placements);
  [[nodiscard]] const Snapshot& snapshot() const { return snapshot_; }

 private:
  [[nodiscard]] std::size_t backward(std::size_t layer) const { return 2 * layers_ - layer; }
  void start_moments(const std::vector<Placement>& placements);
  bool spill(const std::vector<Placement>& placements);
  bool choose_triggers();
  void restore_in_time(const std::vector<Placement>& placements);
  bool fits(const std::vector<Placement>& placements);
  void hold(std::size_t first, std::size_t end, Bytes bytes);
  [[nodiscard]] double restore_seconds(double end, Bytes bytes) const;

  const Snapshot& snapshot_;
  std::size_t layers_;
  double d2h_, h2d_, d2h_shared_, h2d_shared_;
  std::vector<std::vector<std::size_t>> by_layer_;  // sites, in order of use
  std::vector<double> ready_;                       // in forward, since its layer's began; as sites
  std::vector<double> needed_;                      // if nothing stalls; of trips, in order of use
  std::vector<std::uint64_t> enter_, leave_;  // bytes that appear in HBM and go at the start of a moment
  double spilled_ = 0;                        // when the last output has left
  Timeline now_;
};

}  // namespace terrace
