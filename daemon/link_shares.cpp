#include "daemon/link_shares.hpp"

#include <algorithm>
#include <map>

#include "daemon/fair_shares.hpp"

namespace terrace {
namespace {

constexpr Bytes kWhole = Bytes(kLinkWhole);  // fair_shares() divides units, whatever they are of

std::vector<Bytes> leases(std::span<const LinkClaim> claims) {
  std::map<std::size_t, std::vector<std::size_t>> jobs;
  for (std::size_t i = 0; i < claims.size(); ++i) jobs[claims[i].job].push_back(i);
  std::vector<Claim> among_jobs;
  for (const auto& [job, members] : jobs) {
    Claim claim{.demand = {},
                .floor = Bytes(claims[members.front()].guarantee),
                .weight = claims[members.front()].weight};
    for (const std::size_t i : members) claim.demand += Bytes(claims[i].need);
    among_jobs.push_back(claim);
  }
  const std::vector<Bytes> of_jobs = fair_shares(kWhole, among_jobs);
  std::vector<Bytes> leases(claims.size());
  std::size_t next = 0;
  for (const auto& [job, members] : jobs) {
    std::vector<Claim> within;
    for (const std::size_t i : members) within.push_back({Bytes(claims[i].need), 0_B, 1});
    const std::vector<Bytes> shares = fair_shares(of_jobs[next++], within);
    for (std::size_t k = 0; k < members.size(); ++k) leases[members[k]] = shares[k];
  }
  return leases;
}

}  // namespace

std::vector<LinkShare> link_shares(std::span<const LinkClaim> claims) {
  const std::vector<Bytes> leased = leases(claims);
  std::vector<LinkShare> shares;
  std::vector<LinkClaim> as_if(claims.begin(), claims.end());
  for (std::size_t i = 0; i < claims.size(); ++i) {
    const auto lease = static_cast<std::uint32_t>(leased[i].count());
    std::uint32_t usable = lease;
    if (claims[i].need < kLinkWhole) {
      as_if[i].need = kLinkWhole;
      usable = std::max(lease, static_cast<std::uint32_t>(leases(as_if)[i].count()));
      as_if[i].need = claims[i].need;
    }
    shares.push_back({lease, usable});
  }
  return shares;
}

}  // namespace terrace
