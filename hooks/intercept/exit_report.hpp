// What a process says at its end where blocks have travelled: figures in, lines out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/units.hpp"

namespace terrace::hooks {

struct ExitFigures {
  int device = 0;
  Bytes hbm_budget{}, hbm_peak{}, ddr_peak{}, spilled{}, restored{};
  double spill_seconds = 0, restore_seconds = 0;        // of the link's, each direction for itself
  double run = 0;                                       // seconds from the first block on
  double for_restores = 0, at_gates = 0, for_room = 0;  // seconds that threads of the program waited
  std::uint64_t uses_in_ddr = 0;
  double moving = 0, both_ways = 0;  // seconds that blocks were on their way, and in both directions at once
  double remapping = 0;              // of the mover's, in unmapping and mapping
  double finding = 0;                // and in finding memory to move to, most of it in making DDR's:
  Bytes ddr_made{};
  std::uint64_t shown = 0;            // blocks in DDR that were mapped for a use or a question
  std::uint64_t ahead = 0, late = 0;  // blocks that came back before they were asked for, and then
  std::uint64_t step = 0;             // uses in a learned step; 0: none was learned
  std::uint64_t launches = 0, opaque_launches = 0;
  std::string_view first_opaque{};  // its name, and why
  Bytes fixed{};                    // blocks that could not leave
  Bytes all_at_once{};              // HBM in which nothing would have had to leave
};

// A few lines of one device, each with its end; empty where nothing has left HBM.
[[nodiscard]] std::string exit_report(const ExitFigures& figures);

}  // namespace terrace::hooks
