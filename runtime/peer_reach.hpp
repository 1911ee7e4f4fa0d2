// How the GPUs of this machine reach each other's memory.
#pragma once

#include "runtime/result.hpp"

namespace terrace {

struct PeerReach {
  int devices = 0;
  int pairs = 0;           // ordered: from each device to each other one
  int reaching_pairs = 0;  // of those, how many the driver can connect
};

// Asks the driver, and makes no context. Errors: kNotSupported (built without CUDA, or no driver), what the
// driver said.
[[nodiscard]] Result<PeerReach> cuda_peer_reach();

}  // namespace terrace
