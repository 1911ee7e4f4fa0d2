// What a plan promises about the steps that run by it, and how far off it was.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/units.hpp"

namespace terrace {

// Moments are those of Snapshot::schedule; where that is empty, of a micro-batch with n layers: forward of
// layers 0 to n-1, the head, backward of layers n-1 to 0.
struct Prediction {
  struct Window {
    Bytes out, in;                       // what the link carries in this moment
    double out_share = 0, in_share = 0;  // of what it could
  };
  struct Measured {
    double step_seconds = 0, stall_seconds = 0;
    Bytes hbm_peak, ddr_peak;
  };
  struct Error {
    double step_share = 0;     // (measured - predicted) / predicted
    double stall_seconds = 0;  // measured - predicted, as the next two
    std::int64_t hbm_bytes = 0, ddr_bytes = 0;
  };

  double step_seconds = 0;    // all micro-batches, and what lies outside of them
  double residual_share = 0;  // by which it is longer than the model says, as measured steps were
  double stall_seconds = 0;   // of them, waiting for restores
  std::vector<Bytes> hbm;     // most in use at each moment
  Bytes hbm_peak, ddr_peak;   // hbm: live bytes of everybody; ddr: cached outputs
  std::vector<Window> windows;

  // The share of the link that is used in the direction that is used more: outwards from the begin to the
  // head or the last spill's end, inwards from the head to the last backward. The head is the first moment
  // that is no forward.
  double link_window_used = 0;

  [[nodiscard]] Error error(const Measured& measured) const;
};

struct Snapshot;
struct Timeline;
[[nodiscard]] Prediction predict(const Snapshot& snapshot, const Timeline& timeline);

}  // namespace terrace
