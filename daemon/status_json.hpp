// The daemon's answer to a status request, as JSON.
//
//   {"pid", "version", "socket", "listen", "budget": {tier: bytes}, "leased": {tier: bytes}, "clients_total",
//    "accounts": [{"tier", "place" (device, NUMA node or ""), "budget", "leased", "withheld"}],
//    "run": {"processes", SUMMARY},        where a run was asked for
//    "devices": [DEVICE], "jobs": [JOB],   of all live processes (daemon/status_totals.hpp)
//    "clients": [PROCESS], "ended": [PROCESS]}
// PROCESS: {"id", "pid", "user", "job", "device", "run" (hex), "leased": {tier: bytes},
//           "waiting": {tier: bytes}, "link": {direction: lease, 0 to 1}, "deaf", "passthrough", SUMMARY}
// SUMMARY: "hbm_peak_bytes", "ddr_peak_bytes", "transfer_bytes", "cache_hits", "cache_misses", "cache_late",
//          "stall_seconds", "steps", "passthrough_calls", "refused_allocations", "refused_bytes",
//          "unknown_frees"; of a run: peaks of its largest process, sums of the rest
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "daemon/client_registry.hpp"

namespace terrace {

struct DaemonFacts {
  pid_t pid = 0;
  std::string version;
  std::string socket;
  std::string listen;  // empty: metrics are not served
};

// `run`: clients and ended ones of that run alone; 0: all. Lists are cut so that the text fits a message.
[[nodiscard]] std::string status_json(const DaemonFacts& facts, const ClientRegistry::View& view,
                                      std::uint64_t run);

}  // namespace terrace
