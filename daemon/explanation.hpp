// Which rule decides about each site of a model; `terrace check --explain` prints it.
#pragma once

#include <string>
#include <vector>

#include "swapcore/policy/policy.hpp"

namespace terrace {

// A line for each site, or several where phases or steps differ:
//   layer.0.moe.fc1  gmm        ddr      at 14:9, layer.*.moe.fc1: forward, steps 100 to the end
// "auto" alone: no rule matches, and the plan decides; under mode = "rules" that is "discard  no rule".
[[nodiscard]] std::string explanation(const Policy& policy, const std::vector<SiteSpec>& sites);

}  // namespace terrace
