// What one training step costs, operator by operator and layer by layer, measured with device events.
//
// The session opens a profile for a step in which nothing is cached, feeds it, and turns it into the solver's
// snapshot once the step's work has completed. Called from the training thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/device.hpp"
#include "swapcore/plan/solver.hpp"
#include "swapcore/site.hpp"

namespace terrace {

class StepProfile {
 public:
  // kBegin: before the first position; kUpdate: behind the last.
  enum class Phase : std::uint8_t { kBegin, kForward, kHead, kBackward, kUpdate, kEnd };

  StepProfile(Device& device, Stream compute) : device_(device), compute_(compute) {}
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  // The compute stream enters a position; `peak` is the most HBM the position before held.
  void enter(Phase phase, int layer, Bytes peak);
  // One run of a site lies between the two events, which become the profile's. An event that failed ends
  // timing.
  void add_run(SiteId site, Event start, Event end);
  struct Sizes {
    Bytes whole, travels;  // in HBM; on the link and in DDR
  };
  void add_output(SiteId site, const Sizes& sizes);

  // Times by site group and layer, peaks by position: the parts of a snapshot that a step can tell. The
  // step's work has completed.
  [[nodiscard]] Snapshot summarize(const std::vector<SiteSpec>& sites) const;

 private:
  struct Mark {
    Phase phase;
    int layer;
    Event event;
    Bytes peak;  // of the position that starts here; known when the next one does
  };
  struct Run {
    SiteId site;
    Event start, end;
    std::size_t mark;  // in whose position it ran; none: marks_ was empty
  };
  struct Output {
    SiteId site;
    Sizes sizes;
  };
  void add_positions(Snapshot& snapshot) const;
  void add_sites(Snapshot& snapshot, const std::vector<SiteSpec>& sites) const;
  [[nodiscard]] std::optional<double> ready_seconds(const Run& run, const SiteSpec& site) const;
  static void share_untimed(Snapshot& snapshot);

  Device& device_;
  Stream compute_;
  std::vector<Mark> marks_;
  std::vector<Run> runs_;
  std::vector<Output> outputs_;
};

}  // namespace terrace
