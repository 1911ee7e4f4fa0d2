// GET /api/v1/now: what /metrics says, as JSON for the page.
//
//   {"time": seconds since 1970, "version", "clients": live processes,
//    "budget_bytes": {tier: bytes}, "lease_bytes": {tier: bytes},
//    "jobs": {JOB: COUNTED}, "devices": {DEVICE: COUNTED}}
// COUNTED: {"processes", "lease_bytes": {tier: bytes}, METRIC...}; of a job with live processes also
//         "link_lease_ratio": {device: {direction: ratio}}
// METRIC: a name of runtime/metrics.def, its values nested by its labels in their order; a value of zero is
// left
//         out: {"tier_bytes": {"hbm": {"weights": 4096}}, "steps_total": 3}
// Values of jobs are those of /metrics to the last digit. Those of devices are sums over live processes:
// there a counter falls when a process ends.
#pragma once

#include <string>

#include "daemon/client_registry.hpp"

namespace terrace {

[[nodiscard]] std::string now_json(const ClientRegistry::View& view, const std::string& version,
                                   double seconds_since_epoch);

}  // namespace terrace
