// terraced's command line and policy as options of the server, at the start and at each reload.
#pragma once

#include <string>

#include "daemon/server.hpp"
#include "runtime/result.hpp"

namespace terrace {

struct ServeCommandLine {
  std::string policy;                    // a file; empty: the defaults
  std::string socket, listen, hbm, ddr;  // empty: as the policy says
  double exit_when_idle = -1;            // seconds; negative: never
};

// Errors: one line for a person: what the policy's reader says, what is wrong with an option.
[[nodiscard]] Result<Server::Options> serve_options(const ServeCommandLine& line);

}  // namespace terrace
