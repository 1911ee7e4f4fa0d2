#include "runtime/timeline/run_timeline.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace terrace {
namespace {

constexpr std::size_t kMostMarks = std::size_t{1} << 16;  // of many steps

// Rounded once, so that a span ends in the very nanosecond in which the next begins.
long long nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

// Microseconds: what trace events are in. Not below zero.
std::string micros(long long nanoseconds) {
  char text[40];
  std::snprintf(text, sizeof text, "%lld.%03lld", nanoseconds / 1000, nanoseconds % 1000);
  return text;
}

std::string start_of_event(const char* phase, int row, std::string_view name, double at) {
  return std::string("{\"ph\":\"") + phase + "\",\"pid\":1,\"tid\":" + std::to_string(row) +
         ",\"name\":" + json_quoted(name) + ",\"ts\":" + micros(nanoseconds(at));
}

}  // namespace

Result<std::unique_ptr<RunTimeline>> RunTimeline::create(Device& device, Stream compute,
                                                         const std::string& path) {
  std::unique_ptr<RunTimeline> timeline(new RunTimeline(device, compute));
  auto file = TraceEventFile::create(path);
  if (!file) return file.error();
  timeline->file_ = std::move(file).value();
  auto clock = DeviceClock::create(device, compute);
  if (!clock) return clock.error();
  timeline->clock_ = std::move(clock).value();
  timeline->name_row(Row::kCompute, "compute");
  timeline->name_row(Row::kSpills, "spills (device to host)");
  timeline->name_row(Row::kRestores, "restores (host to device)");
  timeline->name_row(Row::kStalls, "stalls");
  timeline->name_row(Row::kPlan, "plan");
  return timeline;
}

RunTimeline::~RunTimeline() {
  if (clock_ == nullptr || file_ == nullptr) return;
  (void)device_.synchronize(compute_);
  write_passed();
  while (!marks_.empty()) {  // of a device that says no more
    write(marks_.front(), last_);
    marks_.pop_front();
  }
  while (!open_.empty()) write(Mark{}, last_);
}

void RunTimeline::name_row(Row row, const char* name) {
  file_->add(std::string(R"({"ph":"M","pid":1,"tid":)") + std::to_string(static_cast<int>(row)) +
             R"(,"name":"thread_name","args":{"name":)" + json_quoted(name) + "}}");
}

EventPool::Held RunTimeline::mark_here() {
  auto event = events_.take();
  if (!event || !device_.record(compute_, **event)) return nullptr;
  return *event;
}

void RunTimeline::begin(std::string name, std::string_view how, const std::optional<Levels>& levels) {
  if (unmarked_ > 0 || marks_.size() >= kMostMarks) {
    ++unmarked_;
    file_->count_dropped();
    return;
  }
  marks_.push_back({mark_here(), true, std::move(name), std::string(how), levels});
  ++begun_;
}

void RunTimeline::end() {
  if (unmarked_ > 0) {
    --unmarked_;
    return;
  }
  if (begun_ == 0) return;
  marks_.push_back({.event = mark_here()});
  --begun_;
}

void RunTimeline::write_passed() {
  while (!marks_.empty()) {
    const Mark& mark = marks_.front();
    if (mark.event != nullptr) {
      if (!device_.completed(*mark.event)) break;
      last_ = std::max(last_, clock_->at(*mark.event).value_or(last_));
    }
    write(mark, last_);
    marks_.pop_front();
  }
  file_->flush();
}

void RunTimeline::write(const Mark& mark, double at) {
  if (mark.levels) {
    for (const auto& [name, bytes] :
         {std::pair{"HBM", mark.levels->hbm}, std::pair{"DDR", mark.levels->ddr}}) {
      file_->add(start_of_event("C", static_cast<int>(Row::kCompute), name, at) +
                 ",\"args\":{\"bytes\":" + std::to_string(bytes.count()) + "}}");
    }
  }
  if (mark.begins) {
    open_.push_back({mark.name, mark.how, at});
    return;
  }
  if (open_.empty()) return;
  const Open ended = std::move(open_.back());
  open_.pop_back();
  write({.row = Row::kCompute,
         .name = ended.name,
         .start = ended.start,
         .seconds = at - ended.start,
         .arguments = ended.how.empty() ? "" : "\"how\":" + json_quoted(ended.how)});
}

void RunTimeline::write(const Span& span) {
  file_->add(start_of_event("X", static_cast<int>(span.row), span.name, span.start) +
             ",\"dur\":" + micros(nanoseconds(span.start + span.seconds) - nanoseconds(span.start)) +
             ",\"args\":{" + span.arguments + "}}");
}

void RunTimeline::moved(const Moved& copy, std::string_view what) {
  write({.row = copy.direction == Direction::kD2H ? Row::kSpills : Row::kRestores,
         .name = name_of(copy.reason),
         .start = copy.start,
         .seconds = copy.end - copy.start,
         .arguments = "\"bytes\":" + std::to_string(copy.bytes.count()) + ",\"what\":" + json_quoted(what)});
}

void RunTimeline::stalled(const char* reason, double start, double seconds, std::string_view what) {
  write({.row = Row::kStalls,
         .name = reason,
         .start = start,
         .seconds = seconds,
         .arguments = "\"what\":" + json_quoted(what)});
}

void RunTimeline::note(const char* name, std::string_view text) {
  file_->add(start_of_event("i", static_cast<int>(Row::kPlan), name, clock_->now()) +
             ",\"s\":\"p\",\"args\":{\"text\":" + json_quoted(text) + "}}");
}

}  // namespace terrace
