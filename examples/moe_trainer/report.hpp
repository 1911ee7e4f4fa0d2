// What a run tells: a progress bar while it lasts, one JSON object when it is done.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "swapcore/session.hpp"

namespace terrace::trainer {

// The most that was held at one time.
struct MemoryPeaks {
  Bytes hbm_mapped, hbm_live, ddr_mapped;
};

// The loss on text that is not trained on, after so many steps.
struct Evaluation {
  std::int64_t step = 0;
  double loss = 0;
  [[nodiscard]] double perplexity() const;
};

// The steps of this process, in order.
struct RunRecord {
  std::vector<float> losses;
  std::vector<double> step_seconds;
  std::vector<MemoryPeaks> step_peaks;
  MemoryPeaks peaks;  // of all steps, and of what came before and between them
  std::int64_t tokens_per_step = 0;
  std::vector<Evaluation> evaluations;
  struct Base {
    std::uint64_t fingerprint = 0, fingerprint_after = 0;
  };
  std::optional<Base> base;  // where adapters were put on one
  struct Streamed {
    Bytes experts_in, state_in, state_out;     // over the link, in all steps
    Bytes experts_resident, experts_streamed;  // held in HBM, slots included, and in DDR
    Bytes experts_nvme, experts_from_nvme;     // live there, and came from there
    Bytes state_nvme, state_from_nvme, state_to_nvme;
    Bytes experts_kept, experts_from_kept;  // room for copies of hot ones, and what came from there
    std::string experts_load;               // as it was at the end; empty: all are resident
    double experts_fired_share = 1;
    std::optional<double> experts_break_even_share;
  };
  std::optional<Streamed> streamed;  // where any of it lives in DDR

  // Takes the session's peaks since the last call into `peaks`, and has them start again. Returns them.
  MemoryPeaks take_peaks(Session& session);

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
