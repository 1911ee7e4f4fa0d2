// What Terrace would gain for a job that was watched for some steps, and which policy would do it. Pure: two
// looks at the job's counters in, words out. Nothing is guessed: a gain in time is claimed only where waiting
// was counted.
#pragma once

#include <string>
#include <vector>

#include "daemon/node_status.hpp"

namespace terrace {

struct Suggestion {
  std::string finding;  // what was seen, and what it means
  std::string gain;     // what it is worth, at most
  std::string policy;   // lines for terrace.toml; empty: no key helps
};

struct Advice {
  std::string observed;                 // one line: steps, time a step, what was held, moved and waited for
  std::vector<Suggestion> suggestions;  // the most valuable first
};

struct Watched {
  JobStatus before, after;  // after.steps is larger
  Counts node_free;         // by tier: of the node's budget, what nobody leases
};
[[nodiscard]] Advice advise(const Watched& watched);
[[nodiscard]] std::string advice_text(const Advice& advice);

}  // namespace terrace
