// What a policy means, in lines for a person; `terrace check` prints them.
#pragma once

#include <string>

#include "swapcore/policy/policy.hpp"

namespace terrace {

[[nodiscard]] std::string policy_summary(const Policy& policy);

}  // namespace terrace
