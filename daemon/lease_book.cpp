#include "daemon/lease_book.hpp"

#include <algorithm>

#include "runtime/assert.hpp"

namespace terrace {
namespace {

constexpr std::size_t index_of(TierId tier) { return static_cast<std::size_t>(tier); }
constexpr std::array kTiers = {TierId::kHbm, TierId::kPeer, TierId::kDdr, TierId::kNvme};
static_assert(kTiers.size() == kTierCount);

}  // namespace

LeaseBook::LeaseBook(const Options& options) : options_(options) {
  for (const TierId tier : kTiers) {
    const Bytes budget = options_.node_budgets[index_of(tier)];
    if (tier == TierId::kHbm) continue;
    if (tier != TierId::kDdr || options_.numa.empty()) {
      (void)open({tier, ""}, budget);
      continue;
    }
    for (const auto& [node, memory] : options_.numa) {
      const std::string place = std::to_string(node);
      (void)open({tier, place}, ddr_part(place, budget));
    }
  }
}

LeaseAccount& LeaseBook::open(const Key& key, Bytes budget) {
  return accounts_.try_emplace(key, key.first, budget, options_.manners).first->second;
}

// A NUMA node's part of what may be pinned on the whole node, rounded down.
Bytes LeaseBook::ddr_part(const std::string& place, Bytes whole) const {
  if (place.empty()) return whole;
  double all = 0, own = 0;
  for (const auto& [node, memory] : options_.numa) {
    all += static_cast<double>(memory.count());
    if (std::to_string(node) == place) own = static_cast<double>(memory.count());
  }
  return all > 0 ? Bytes(static_cast<std::uint64_t>(own / all * static_cast<double>(whole.count()))) : 0_B;
}

LeaseBook::Key LeaseBook::ddr_key(int numa_node) const {
  if (options_.numa.empty()) return {TierId::kDdr, ""};
  if (options_.numa.contains(numa_node)) return {TierId::kDdr, std::to_string(numa_node)};
  Key best;
  Bytes most;
  for (const auto& [key, account] : accounts_) {
    if (key.first != TierId::kDdr) continue;
    const Bytes left = saturating_sub(account.budget(), account.leased());
    if (best.second.empty() || left > most) best = key, most = left;
  }
  return best;
}

void LeaseBook::set_terms(LeaseAccount& account, TierId tier, const std::string& job) const {
  const auto found = terms_.find(job);
  if (found == terms_.end()) return;
  const LeaseTerms& terms = found->second;
  Bytes guarantee;
  if (tier == TierId::kHbm) guarantee = terms.hbm.resolve(account.budget(), 0_B);
  if (tier == TierId::kDdr) guarantee = terms.ddr.resolve(account.budget(), 0_B);
  account.set_terms(job, {terms.weight, guarantee});
}

void LeaseBook::adopt(ClientId id, const Newcomer& newcomer) {
  TERRACE_CHECK(!clients_.contains(id), "a client is adopted once");
  Client& client = clients_[id];
  client.job = newcomer.job;
  for (const TierId tier : kTiers) {
    Key key{tier, ""};
    if (tier == TierId::kHbm) key.second = newcomer.device;
    if (tier == TierId::kDdr) key = ddr_key(newcomer.numa_node);
    LeaseAccount& of_tier = open(key, newcomer.hbm_budget);
    if (tier == TierId::kHbm && of_tier.empty()) of_tier.set_budget(newcomer.hbm_budget);
    set_terms(of_tier, tier, newcomer.job);
    of_tier.enter(id, newcomer.job, newcomer.held[index_of(tier)]);
    // Somebody who has left may be back with what it holds.
    if (tier == TierId::kHbm)
      withhold(key, of_tier, saturating_sub(of_tier.withheld(), newcomer.held[index_of(tier)]));
    client.keys[index_of(tier)] = std::move(key);
  }
}

void LeaseBook::leave(ClientId id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  for (const Key& key : found->second.keys) {
    const auto of_tier = accounts_.find(key);
    LeaseAccount& left = of_tier->second;
    const Bytes leased = left.leased(id);
    left.leave(id);
    if (key.first != TierId::kHbm) continue;
    if (leased > 0_B && options_.driver_tells && options_.driver_tells(key.second))
      withhold(key, left, left.withheld() + leased);
    else if (left.empty() && left.withheld() == 0_B)
      accounts_.erase(of_tier);
  }
  clients_.erase(found);
}

// May erase the account.
void LeaseBook::withhold(const Key& key, LeaseAccount& account, Bytes bytes) {
  account.withhold(bytes);
  if (account.withheld() == 0_B && account.empty()) accounts_.erase(key);
}

std::vector<std::string> LeaseBook::withholding() const {
  std::vector<std::string> devices;
  for (const auto& [key, of_tier] : accounts_) {
    if (of_tier.withheld() > 0_B) devices.push_back(key.second);
  }
  return devices;
}

void LeaseBook::show_free(const std::string& device, Bytes shown) {
  const Key key{TierId::kHbm, device};
  const auto found = accounts_.find(key);
  if (found == accounts_.end()) return;
  LeaseAccount& account = found->second;
  const Bytes free = saturating_sub(account.budget(), account.leased());
  withhold(key, account, std::min(account.withheld(), saturating_sub(free, shown)));
}

void LeaseBook::set_terms(const std::string& job, const LeaseTerms& terms) {
  LeaseTerms& kept = terms_[job];
  if (kept == terms) return;
  kept = terms;
  for (auto& [key, of_tier] : accounts_) set_terms(of_tier, key.first, job);
}

void LeaseBook::set_budgets(const TierAmounts& node_budgets, const std::map<std::string, Bytes>& hbm) {
  for (auto& [key, of_tier] : accounts_) {
    const Bytes whole = node_budgets[index_of(key.first)];
    if (key.first == TierId::kHbm) {
      if (const auto found = hbm.find(key.second); found != hbm.end()) of_tier.set_budget(found->second);
    } else {
      of_tier.set_budget(key.first == TierId::kDdr ? ddr_part(key.second, whole) : whole);
    }
    for (const auto& [job, terms] : terms_) set_terms(of_tier, key.first, job);
  }
}

const LeaseBook::Client& LeaseBook::known(ClientId client) const {
  const auto found = clients_.find(client);
  TERRACE_CHECK(found != clients_.end(), "the client was adopted and has not left");
  return found->second;
}
LeaseAccount& LeaseBook::account(ClientId client, TierId tier) {
  return accounts_.at(known(client).keys[index_of(tier)]);
}
const LeaseAccount& LeaseBook::account(ClientId client, TierId tier) const {
  return accounts_.at(known(client).keys[index_of(tier)]);
}

Bytes LeaseBook::request(ClientId client, TierId tier, Bytes wanted, Unmet unmet, Time now) {
  return account(client, tier).request(client, wanted, unmet, now);
}
Bytes LeaseBook::release(ClientId client, TierId tier, Bytes bytes) {
  return account(client, tier).release(client, bytes);
}
Bytes LeaseBook::answer(ClientId client, const Answer& answer, Time now) {
  return account(client, answer.tier).answer(client, answer.ask, answer.released, now);
}

std::vector<LeaseEvent> LeaseBook::settle(Time now) {
  std::vector<LeaseEvent> events;
  for (auto& [key, of_tier] : accounts_) of_tier.settle(now, events);
  return events;
}

std::optional<LeaseBook::Time> LeaseBook::due() const {
  std::optional<Time> first;
  for (const auto& [key, of_tier] : accounts_) {
    if (of_tier.due() && (!first || *of_tier.due() < *first)) first = of_tier.due();
  }
  return first;
}

Bytes LeaseBook::leased(ClientId client, TierId tier) const {
  return clients_.contains(client) ? account(client, tier).leased(client) : Bytes();
}
Bytes LeaseBook::waiting(ClientId client, TierId tier) const {
  return clients_.contains(client) ? account(client, tier).waiting(client) : Bytes();
}
bool LeaseBook::coming(ClientId client, TierId tier) const {
  return waiting(client, tier) > 0_B && account(client, tier).coming();
}
bool LeaseBook::deaf(ClientId client) const {
  if (!clients_.contains(client)) return false;
  return std::any_of(kTiers.begin(), kTiers.end(),
                     [&](TierId tier) { return account(client, tier).deaf(client); });
}
Bytes LeaseBook::budget(ClientId client, TierId tier) const { return account(client, tier).budget(); }
Bytes LeaseBook::free(ClientId client, TierId tier) const {
  const LeaseAccount& of_tier = account(client, tier);
  return saturating_sub(of_tier.budget(), of_tier.leased() + of_tier.withheld());
}

Bytes LeaseBook::leased(TierId tier) const {
  Bytes sum;
  for (const auto& [key, of_tier] : accounts_) {
    if (key.first == tier) sum += of_tier.leased();
  }
  return sum;
}
Bytes LeaseBook::budget(TierId tier) const {
  Bytes sum;
  for (const auto& [key, of_tier] : accounts_) {
    if (key.first == tier) sum += of_tier.budget();
  }
  return sum;
}

std::vector<LeaseBook::AccountView> LeaseBook::accounts() const {
  std::vector<AccountView> views;
  for (const auto& [key, of_tier] : accounts_)
    views.push_back({key.first, key.second, of_tier.budget(), of_tier.leased(), of_tier.withheld()});
  return views;
}

}  // namespace terrace
