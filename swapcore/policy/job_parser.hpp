// [[daemon.job]]: internal to the policy parser.
#pragma once

#include <vector>

#include "swapcore/policy/section_reader.hpp"

namespace terrace {

// Reads the value of daemon.job. What is wrong goes to `problems`.
[[nodiscard]] std::vector<JobRule> parse_jobs(const toml::node& node, Problems& problems);

// What is wrong with the name of a user or group, or nothing. Empty is a name here: of nobody.
[[nodiscard]] std::optional<std::string> account_fault(std::string_view name);

}  // namespace terrace
