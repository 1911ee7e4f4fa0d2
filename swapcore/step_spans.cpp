#include "swapcore/step_spans.hpp"

#include <utility>

#include "runtime/profiler_ranges.hpp"

namespace terrace {

StepSpans::StepSpans(RunTimeline* timeline)
    : timeline_(timeline), profiled_(profiler_listens()), watched_(timeline != nullptr || profiled_) {}

void StepSpans::open(std::string name, const char* how, const std::optional<RunTimeline::Levels>& levels) {
  ++depth_;
  if (profiled_) push_profiler_range(name.c_str());
  if (timeline_ != nullptr) timeline_->begin(std::move(name), how, levels);
}

void StepSpans::end() {
  if (!watched_ || depth_ == 0) return;
  --depth_;
  if (profiled_) pop_profiler_range();
  if (timeline_ != nullptr) timeline_->end();
}

void StepSpans::end_down_to(Depth depth) {
  while (depth_ > static_cast<int>(depth)) end();
}

void StepSpans::step(std::uint64_t number, const RunTimeline::Levels& levels) {
  end_down_to(Depth::kNothing);
  in_step_ = true;
  open("step " + std::to_string(number), "", levels);
}

void StepSpans::position(std::string name, const RunTimeline::Levels& levels) {
  end_down_to(in_step_ ? Depth::kStep : Depth::kNothing);
  open(std::move(name), "", levels);
}

void StepSpans::end_step() {
  end_down_to(Depth::kNothing);
  in_step_ = false;
  if (timeline_ != nullptr) timeline_->write_passed();
}

void StepSpans::begin(const std::string& name, const char* how) {
  if (watched_) open(name, how, std::nullopt);
}

}  // namespace terrace
