// The sites of a model, for those who place them by rules.
#pragma once

#include <string>
#include <vector>

#include "examples/moe_trainer/settings.hpp"
#include "swapcore/site.hpp"

namespace terrace::trainer {

// The sites of the configured model, in order of use: {"sites": [{"name", "kind", "layer", "group"}, ...]}.
// --config may name the config.json of a public model; of its folder nothing else is read. No accelerator is
// touched. Throws Failure.
[[nodiscard]] std::string sites_json(const Settings& settings);

// Prints a warning on stderr for every rule that matches none of the sites. Throws Failure (kBadInput) where
// two rules contradict each other on one.
void check_rules(const Policy& policy, const std::vector<SiteSpec>& sites);

}  // namespace terrace::trainer
