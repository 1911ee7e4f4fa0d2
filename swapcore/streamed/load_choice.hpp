// Whether the experts of a layer are fetched whole, in the order of layers and ahead of their use, or those
// alone that tokens go to, when the router has said which.
//
//   by layer    what is not resident crosses the link once a pass, beside compute:
//                 max(forward, all / rate) + max(backward, all / rate)
//   by router   forward asks and then waits, layer by layer; backward knows the answers and fetches ahead:
//                 forward + asking + fired / rate + max(backward, fired / rate)
//
// Pure: no clock, no device.
#pragma once

#include "runtime/units.hpp"

namespace terrace {

enum class ExpertLoad : std::uint8_t { kLayer = 0, kRouter, kAuto };  // kAuto: the cheaper of the two
[[nodiscard]] const char* name_of(ExpertLoad load);

struct LoadCosts {
  double forward_seconds = 0, backward_seconds = 0;  // of a step's compute
  double asking_seconds = 0;                         // that forward waits for routers' words
  Bytes all;                                         // of the experts that are not resident, once a pass
  double fired_share = 1;                            // of those bytes, that of experts with tokens
  double bytes_per_second = 0;                       // of the link
};

// Precondition of all: bytes_per_second > 0. Seconds of a step. `load` is not kAuto.
[[nodiscard]] double predicted_seconds(const LoadCosts& costs, ExpertLoad load);
// The share below which the router's word is cheaper: 0 where it never is, 1 where it always is.
[[nodiscard]] double break_even_share(const LoadCosts& costs);
// What to do from the next step on. The other way must promise 3% of a step: less is noise.
[[nodiscard]] ExpertLoad choose_load(const LoadCosts& costs, ExpertLoad now);

}  // namespace terrace
