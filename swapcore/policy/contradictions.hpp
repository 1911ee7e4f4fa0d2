// Values that are each well-formed and can't be meant together. Internal to the policy parser.
#pragma once

#include <optional>
#include <vector>

#include "swapcore/policy/rule_parser.hpp"
#include "swapcore/policy/section_reader.hpp"

namespace terrace {

// Where the file says what; nothing where a default stands.
struct PolicyPositions {
  std::optional<Position> hbm_budget, hbm_reserve, ddr_budget;
  std::optional<Position> swapcore_mode, swapcore_hbm_budget, swapcore_ddr_budget;
  std::optional<Position> checkpoint_budget;
};

void find_contradictions(const Policy& policy, const PolicyPositions& positions,
                         const std::vector<PlacedRule>& rules, Problems& problems);

}  // namespace terrace
