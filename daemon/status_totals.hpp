// The live processes of a status, added up by job and by device: what a screen shows, and what advice is made
// of.
//
//   JOB: {"job", "processes", "leased": {tier: bytes}, "bytes": {tier: bytes}, "budget": {tier: bytes},
//         "peak_bytes": {tier: bytes} (of the largest process), "copied_bytes": {direction: bytes},
//         "window_bytes": {direction: bytes}, "window_capacity_bytes": {direction: bytes},
//         "fetches": {outcome: count}, "stall_seconds": {reason: seconds}, "steps" (of all processes),
//         "step_seconds", "evictions", "fallbacks", "damaged_blocks"}
//   DEVICE: {"device", "processes", "leased_bytes", "bytes"}, both of HBM
// Zeros are left out of the objects by direction, outcome and reason.
#pragma once

#include <nlohmann/json.hpp>

#include "daemon/client_registry.hpp"

namespace terrace {

// One object a job, in the order of names.
[[nodiscard]] nlohmann::ordered_json job_totals(const ClientRegistry::View& view);
// One object a device, in the order of names.
[[nodiscard]] nlohmann::ordered_json device_totals(const ClientRegistry::View& view);

}  // namespace terrace
