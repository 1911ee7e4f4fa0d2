// Names what the compute stream is given to do, step by step, layer by layer, site by site: for the run's
// timeline, and as ranges for a profiler. Where neither looks, each call is one branch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/timeline/run_timeline.hpp"

namespace terrace {

class StepSpans {
 public:
  explicit StepSpans(RunTimeline* timeline);  // null: there is none

  [[nodiscard]] bool watched() const { return watched_; }
  [[nodiscard]] RunTimeline* timeline() const { return timeline_; }
  // What follows belongs to this step; what is open ends.
  void step(std::uint64_t number, const RunTimeline::Levels& levels);
  // What follows in the step is this: a layer's pass, the head, the optimizer. Ends the one before.
  void position(std::string name, const RunTimeline::Levels& levels);
  void end_step();
  // Within a position, or outside of all.
  void begin(const std::string& name, const char* how);
  void end();

 private:
  enum class Depth : std::uint8_t { kNothing = 0, kStep = 1, kPosition = 2 };
  void open(std::string name, const char* how, const std::optional<RunTimeline::Levels>& levels);
  void end_down_to(Depth depth);

  RunTimeline* const timeline_;
  const bool profiled_;
  const bool watched_;
  bool in_step_ = false;
  int depth_ = 0;
};

}  // namespace terrace
