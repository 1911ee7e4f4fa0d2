// How the time of a link, in one direction, is divided among the processes that use its device. A pure
// function.
//
// First among jobs by weight, above their guarantees, then evenly among a job's processes, as bytes are
// (fair_shares.hpp). But time that nobody uses is lost, so a share is of what a process needs, and what all
// leave is everybody's: whoever begins to need more may use, until it is looked at again, what it would be
// due if it needed everything.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/link_board.hpp"

namespace terrace {

struct LinkClaim {
  std::size_t job = 0;          // those of one number are one job's
  std::uint32_t weight = 1;     // of the job; at least 1
  std::uint32_t guarantee = 0;  // of the job, while it needs it; millionths
  std::uint32_t need = 0;       // of the process, at most kLinkWhole
};
struct LinkShare {
  std::uint32_t lease = 0;   // millionths; the sum is min(kLinkWhole, the sum of needs)
  std::uint32_t usable = 0;  // at least the lease
  bool operator==(const LinkShare&) const = default;
};

// In the order of the claims.
[[nodiscard]] std::vector<LinkShare> link_shares(std::span<const LinkClaim> claims);

}  // namespace terrace
