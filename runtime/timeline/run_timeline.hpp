// What a run did and when, as a trace for Chrome or Perfetto: rows for the compute stream, both directions of
// the link, the waits, the plan; curves of memory. All on one time base, runtime/timeline/device_clock.hpp.
//
// Spans of the compute stream are marks in it, whose times are read once they have passed. Marks that wait to
// be read are bounded, and so are the bytes of the file: beyond that events are counted and not shown.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/copy_engine.hpp"
#include "runtime/copy_events.hpp"
#include "runtime/device.hpp"
#include "runtime/timeline/device_clock.hpp"
#include "runtime/timeline/trace_event_file.hpp"

namespace terrace {

class RunTimeline {
 public:
  struct Levels {  // bytes in use
    Bytes hbm, ddr;
  };
  struct Moved {
    Direction direction = Direction::kH2D;
    CopyReason reason = CopyReason::kSpill;
    Bytes bytes;
    double start = 0, end = 0;  // seconds of clock()
  };

  // Waits once for `compute`. Device and stream outlive the timeline. Errors: kIo (the file), device errors.
  [[nodiscard]] static Result<std::unique_ptr<RunTimeline>> create(Device& device, Stream compute,
                                                                   const std::string& path);
  ~RunTimeline();  // waits for the compute stream; what is still open ends there
  RunTimeline(const RunTimeline&) = delete;
  RunTimeline& operator=(const RunTimeline&) = delete;

  [[nodiscard]] DeviceClock& clock() { return *clock_; }

  // From here on in the compute stream, until the matching end(). Spans nest. From one thread, as the next
  // two.
  void begin(std::string name, std::string_view how, const std::optional<Levels>& levels);
  void end();
  // Writes what has passed. Once a step.
  void write_passed();

  // A copy, `what` of which moved. Any thread, as all below.
  void moved(const Moved& copy, std::string_view what);
  // Time in which the compute stream, or the host on its behalf, waited.
  void stalled(const char* reason, double start, double seconds, std::string_view what);
  // Something was decided now: "plan", "measure", "fallback".
  void note(const char* name, std::string_view text);

  [[nodiscard]] Status status() const { return file_->status(); }

 private:
  enum class Row : int { kCompute = 1, kSpills = 2, kRestores = 3, kStalls = 4, kPlan = 5 };
  struct Mark {
    EventPool::Held event{};  // null: the device gave none, and the time is that of the mark before
    bool begins = false;
    std::string name{};
    std::string how{};
    std::optional<Levels> levels{};
  };
  struct Open {
    std::string name, how;
    double start = 0;
  };
  struct Span {
    Row row;
    std::string_view name;
    double start = 0, seconds = 0;
    std::string arguments;  // the inside of a JSON object
  };

  RunTimeline(Device& device, Stream compute) : device_(device), compute_(compute), events_(device) {}
  void name_row(Row row, const char* name);
  void write(const Span& span);
  void write(const Mark& mark, double at);
  [[nodiscard]] EventPool::Held mark_here();

  Device& device_;
  const Stream compute_;
  std::unique_ptr<DeviceClock> clock_;
  std::unique_ptr<TraceEventFile> file_;
  EventPool events_;
  std::deque<Mark> marks_;  // not read yet
  std::vector<Open> open_;  // as far as marks are read
  int begun_ = 0;           // and not ended, of those that have marks
  int unmarked_ = 0;        // begun within those, without marks: there were too many
  double last_ = 0;         // of the marks read; time does not go back
};

}  // namespace terrace
