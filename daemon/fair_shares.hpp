// How a budget is divided among claims: weighted max-min fairness above floors. A pure function.
//
//   share_i = max(floor_i, min(demand_i, weight_i * level)), with the level at which the shares use up the
//   budget
//
// Nobody gets more than it demands; what one leaves goes to the others by weight; nobody falls under its
// floor to make them equal. Shares are exact to the byte: their sum is min(budget, sum of demands).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/units.hpp"

namespace terrace {

struct Claim {
  Bytes demand;
  Bytes floor;               // the part above `demand` is not looked at
  std::uint32_t weight = 1;  // at least 1
};

// In the order of the claims. Floors that come to more than the budget are cut in proportion.
[[nodiscard]] std::vector<Bytes> fair_shares(Bytes budget, std::span<const Claim> claims);

}  // namespace terrace
