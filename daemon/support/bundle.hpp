// The files of `terrace support`: what a bug report needs, scrubbed of secrets and names
// (daemon/support/scrub.hpp).
#pragma once

#include <string>
#include <vector>

#include "daemon/support/scrub.hpp"
#include "daemon/support/tar_file.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {

struct SupportCase {
  Policy policy;
  std::string policy_file;  // empty: the defaults
  std::string socket;       // of the daemon; terraced.log is looked for beside it
};

// contents.txt first, which says in a line what each of the others is, or why it is missing: version.txt,
// doctor.json, policy.toml, status.json, metrics.txt, terraced.log (its end).
[[nodiscard]] std::vector<TarMember> support_files(const SupportCase& subject, const Identity& identity);

}  // namespace terrace
