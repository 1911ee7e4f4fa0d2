// A step's moments in time, under given placements: when each output leaves, is back, is asked for; what HBM
// holds meanwhile. docs/design/0004-plan.md has the model.
//
// Where the snapshot has no schedule, the moments are those of one micro-batch.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "swapcore/plan/solver.hpp"

namespace terrace {

// Times are seconds since the first moment began; moments are those of Prediction.
struct Timeline {
  struct Trip {
    std::size_t site = 0;  // as Snapshot::sites
    std::uint32_t micro_batch = 0;
    std::size_t own = 0;        // the moment of its backward
    std::size_t departure = 0;  // the moment at whose start it holds no HBM any more
    std::size_t trigger = 0;    // the moment at whose start its restore is submitted
    Bytes bytes;
    double spill_start = 0, spill_end = 0, restore_start = 0, restore_end = 0;
  };
  double seconds = 0;          // stalls included
  double stall_seconds = 0;    // of them, waiting for restores
  std::size_t head = 0;        // the first moment that is no forward: nothing is brought back before
  std::vector<double> starts;  // of each moment, and the end of the last
  std::vector<Bytes> hbm;      // most in use at each moment, at most
  Bytes ddr;                   // most held by cached outputs
  std::vector<Trip> trips;     // in order of use
};

class Windows {
 public:
  // The schedule is one: each layer and micro-batch goes forward once, and backward once after that.
  explicit Windows(const Snapshot& snapshot);

  // Nothing where a limit of the snapshot would be exceeded, or an output asked back before it has left.
  // O(moments and the sites of each). The reference is good until the next call.
  [[nodiscard]] const Timeline* simulate(const std::vector<Placement>& placements);
  // As Plan::nodes, of the placements last simulated.
  [[nodiscard]] std::vector<int> nodes() const;
  [[nodiscard]] const Snapshot& snapshot() const { return snapshot_; }

 private:
  void learn_order();
  void find_backwards();
  [[nodiscard]] std::size_t layer_of(std::size_t moment) const {
    return static_cast<std::size_t>(moments_[moment].layer);
  }
  [[nodiscard]] bool is(std::size_t moment, Moment::Phase phase) const {
    return moments_[moment].phase == phase;
  }
  bool count(const std::vector<Placement>& placements);
  bool settle_on_a_node(std::size_t site, Bytes bytes);
  void start_moments();
  void make_room_for_trips();
  void spill(const std::vector<Placement>& placements);
  void note_needs(const std::vector<Placement>& placements);
  bool choose_triggers();
  void restore_in_time(const std::vector<Placement>& placements);
  bool fits(const std::vector<Placement>& placements);
  void hold(std::size_t first, std::size_t end, Bytes bytes);
  [[nodiscard]] double restore_seconds(double end, Bytes bytes) const;
  [[nodiscard]] Bytes peak_at(std::size_t moment) const;

  const Snapshot& snapshot_;
  std::size_t layers_;
  double d2h_, h2d_, d2h_shared_, h2d_shared_;
  std::vector<Moment> moments_;
  std::vector<std::size_t> forwards_, backwards_;  // moments, in order
  std::vector<std::size_t> backward_;              // by moment of a forward: that of its backward
  std::vector<std::uint64_t>
      in_flight_;  // by layer: most micro-batches between forward and backward at a time
  std::vector<std::vector<std::size_t>> by_layer_;  // sites, in order of use
  std::vector<double> ready_;                       // in forward, since its layer's began; as sites
  std::vector<std::size_t> travelling_;             // by layer, how many sites
  std::vector<std::size_t> first_trip_;             // by moment of a backward
  std::vector<double> saved_;                       // by layer, of its backward
  std::vector<std::size_t> node_;                   // as sites: which of snapshot_.ddr_nodes, of those in DDR
  std::vector<std::uint64_t> on_node_;              // bytes, by node
  std::vector<double> needed_;                      // if nothing stalls; of trips, in order of use
  std::vector<std::uint64_t> enter_, leave_;  // bytes that appear in HBM and go at the start of a moment
  double spilled_ = 0;                        // when the last output has left
  Timeline now_;
};

}  // namespace terrace
