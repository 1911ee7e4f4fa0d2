#include "daemon/link_shares.hpp"

#include <algorithm>
#include <map>

#include "daemon/fair_shares.hpp"

namespace terrace {
namespace {

constexpr Bytes kWhole = Bytes(kLinkWhole);  // fair_shares() divides units, whatever they are of

// Claims by job, sorted once for all that is asked of them.
class Division {
 public:
  explicit Division(std::span<const LinkClaim> claims) : claims_(claims) {
    std::map<std::size_t, std::size_t> places;
    for (std::size_t i = 0; i < claims.size(); ++i) {
      const auto [place, fresh] = places.try_emplace(claims[i].job, jobs_.size());
      if (fresh) {
        jobs_.emplace_back();
        among_jobs_.push_back(
            {.demand = {}, .floor = Bytes(claims[i].guarantee), .weight = claims[i].weight});
      }
      jobs_[place->second].push_back(i);
      among_jobs_[place->second].demand += Bytes(claims[i].need);
      job_of_.push_back(place->second);
    }
  }

  [[nodiscard]] std::vector<Bytes> leases() const {
    const std::vector<Bytes> of_jobs = fair_shares(kWhole, among_jobs_);
    std::vector<Bytes> leases(claims_.size());
    for (std::size_t job = 0; job < jobs_.size(); ++job) {
      const std::vector<Bytes> shares = fair_shares(of_jobs[job], within(job));
      for (std::size_t k = 0; k < shares.size(); ++k) leases[jobs_[job][k]] = shares[k];
    }
    return leases;
  }

  // What claim `i` would be due if it needed all there is.
  [[nodiscard]] Bytes at_most(std::size_t i) const {
    const std::size_t job = job_of_[i];
    std::vector<Claim> among = among_jobs_;
    among[job].demand += kWhole - Bytes(claims_[i].need);
    std::vector<Claim> members = within(job);
    const auto place = static_cast<std::size_t>(std::lower_bound(jobs_[job].begin(), jobs_[job].end(), i) -
                                                jobs_[job].begin());
    members[place].demand = kWhole;
    return fair_shares(fair_shares(kWhole, among)[job], members)[place];
  }

 private:
  [[nodiscard]] std::vector<Claim> within(std::size_t job) const {
    std::vector<Claim> members;
    for (const std::size_t i : jobs_[job]) members.push_back({Bytes(claims_[i].need), 0_B, 1});
    return members;
  }

  std::span<const LinkClaim> claims_;
  std::vector<std::vector<std::size_t>> jobs_;  // their claims, in order
  std::vector<Claim> among_jobs_;
  std::vector<std::size_t> job_of_;  // by claim
};

}  // namespace

std::vector<LinkShare> link_shares(std::span<const LinkClaim> claims) {
  const Division division(claims);
  std::vector<LinkShare> shares;
  for (const Bytes leased : division.leases()) {
    const auto lease = static_cast<std::uint32_t>(leased.count());
    const std::size_t i = shares.size();
    const bool all = claims[i].need >= kLinkWhole;
    const auto usable = all ? lease : static_cast<std::uint32_t>(division.at_most(i).count());
    shares.push_back({lease, std::max(lease, usable)});
  }
  return shares;
}

}  // namespace terrace
