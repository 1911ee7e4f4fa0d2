// Weighted max-min fairness in the simplest way there is: whoever has least for its weight gets the next
// byte.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "daemon/fair_shares.hpp"

namespace terrace::test {

// Precondition: the budget pays the floors.
inline std::vector<Bytes> shares_byte_by_byte(Bytes budget, std::span<const Claim> claims) {
  std::vector<std::uint64_t> shares;
  std::uint64_t left = budget.count();
  for (const Claim& claim : claims) {
    shares.push_back(std::min(claim.demand, claim.floor).count());
    left -= shares.back();
  }
  for (; left > 0; --left) {
    std::size_t next = claims.size();
    for (std::size_t i = 0; i < claims.size(); ++i) {
      if (shares[i] == claims[i].demand.count()) continue;
      const bool first = next == claims.size() ||
                         (shares[i] + 1) * claims[next].weight < (shares[next] + 1) * claims[i].weight;
      if (first) next = i;
    }
    if (next == claims.size()) break;
    ++shares[next];
  }
  std::vector<Bytes> result;
  for (const std::uint64_t share : shares) result.emplace_back(share);
  return result;
}

}  // namespace terrace::test
