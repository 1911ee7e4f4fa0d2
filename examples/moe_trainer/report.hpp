// What a run tells: a progress bar while it lasts, one JSON object when it is done.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "swapcore/session.hpp"

namespace terrace::trainer {

// The steps of this process, in order.
struct RunRecord {
  std::vector<float> losses;
  std::vector<double> step_seconds;
  std::int64_t tokens_per_step = 0;

  // The median, without the first two steps, in which the session measures; 0 where no step was run.
  [[nodiscard]] double ms_per_step() const;
  [[nodiscard]] double tokens_per_second() const;
};

// Writes the result as JSON; docs/TRAINER.md lists the keys. Throws Failure where the file cannot be written.
void write_report(const std::string& path, const RunRecord& record, const Session& session);

// A line on stderr that redraws itself; silent where stderr is no terminal.
class Progress {
 public:
  enum class Show : std::uint8_t { kOnTerminal, kNever };
  Progress(Show show, std::int64_t steps);
  ~Progress();  // leaves the cursor on a line of its own
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void update(std::int64_t step, const RunRecord& record);

 private:
  bool visible_ = false;
  bool drawn_ = false;
  std::int64_t steps_;
};

}  // namespace terrace::trainer
