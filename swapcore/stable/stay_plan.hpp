// Which blocks stay in HBM from one use to the next where the uses repeat themselves: a pure function.
//
//   cycle   a b c d e f | a b c ...     room for two:  a and d stay, the others come before their use and
//           *     *                     leave after it, one behind the other, all the time
//
// What is used again soonest stays first. Of those that are used again about equally late, as in a program
// that goes through all of its blocks in order, those stay that lie evenly among the others: so the link has
// as much to do at any time, and not all of it while what stays is not used.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/units.hpp"

namespace terrace {

struct CycleUse {
  std::uint32_t block = 0;
  Bytes size;
};
// By use of the cycle: its block stays until it is used next. Never more than `room` at a time.
[[nodiscard]] std::vector<bool> choose_stays(std::span<const CycleUse> cycle, Bytes room);

}  // namespace terrace
