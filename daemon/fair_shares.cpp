#include "daemon/fair_shares.hpp"

#include <algorithm>
#include <numeric>

#include "runtime/assert.hpp"

namespace terrace {
namespace {

// Sums of many 64-bit amounts, and their products with a weight.
__extension__ using Wide = unsigned __int128;

Wide share_at(const Claim& claim, std::uint64_t level) {
  const Wide floor = std::min(claim.floor, claim.demand).count();
  const Wide fair = std::min<Wide>(claim.demand.count(), Wide{level} * claim.weight);
  return std::max(floor, fair);
}

Wide sum_at(std::span<const Claim> claims, std::uint64_t level) {
  return std::accumulate(claims.begin(), claims.end(), Wide{0},
                         [level](Wide sum, const Claim& claim) { return sum + share_at(claim, level); });
}

// The highest level whose shares the budget pays. Precondition: it pays those at level 0.
std::uint64_t level_for(Bytes budget, std::span<const Claim> claims) {
  std::uint64_t paid = 0, unpaid = budget.count();
  if (sum_at(claims, unpaid) <= budget.count()) return unpaid;
  while (unpaid - paid > 1) {
    const std::uint64_t middle = paid + (unpaid - paid) / 2;
    (sum_at(claims, middle) <= budget.count() ? paid : unpaid) = middle;
  }
  return paid;
}

std::vector<Bytes> cut_floors(Bytes budget, std::span<const Claim> claims, Wide floors) {
  std::vector<Bytes> shares;
  for (const Claim& claim : claims) {
    shares.emplace_back(static_cast<std::uint64_t>(share_at(claim, 0) * budget.count() / floors));
  }
  return shares;
}

}  // namespace

std::vector<Bytes> fair_shares(Bytes budget, std::span<const Claim> claims) {
  const Wide floors = sum_at(claims, 0);
  if (floors > budget.count()) return cut_floors(budget, claims, floors);
  const std::uint64_t level = level_for(budget, claims);
  std::vector<Bytes> shares;
  Wide left = budget.count() - sum_at(claims, level);
  for (const Claim& claim : claims) {
    TERRACE_CHECK(claim.weight > 0, "a claim has a weight");
    const Wide share = share_at(claim, level);
    // Less than one byte a weight is left: those it would raise get it in their order.
    const Wide next = level == UINT64_MAX ? share : share_at(claim, level + 1);
    const Wide more = std::min(left, next - share);
    left -= more;
    shares.emplace_back(static_cast<std::uint64_t>(share + more));
  }
  return shares;
}

}  // namespace terrace
