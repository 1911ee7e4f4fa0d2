#include "daemon/lease_book.hpp"

#include <algorithm>

namespace terrace {
namespace {

constexpr std::size_t index_of(TierId tier) { return static_cast<std::size_t>(tier); }
constexpr std::array kTiers = {TierId::kHbm, TierId::kPeer, TierId::kDdr, TierId::kNvme};
static_assert(kTiers.size() == kTierCount);

}  // namespace

LeaseBook::LeaseBook(TierAmounts node_budgets) {
  for (const TierId tier : kTiers) node_[index_of(tier)].budget = node_budgets[index_of(tier)];
}

LeaseBook::Account& LeaseBook::account(const Client& client, TierId tier) {
  return tier == TierId::kHbm ? devices_.at(client.device) : node_[index_of(tier)];
}
const LeaseBook::Account& LeaseBook::account(const Client& client, TierId tier) const {
  return tier == TierId::kHbm ? devices_.at(client.device) : node_[index_of(tier)];
}

LeaseBook::Client& LeaseBook::known(ClientId client) {
  const auto found = clients_.find(client);
  TERRACE_CHECK(found != clients_.end(), "the client was adopted and has not left");
  return found->second;
}
const LeaseBook::Client& LeaseBook::known(ClientId client) const {
  const auto found = clients_.find(client);
  TERRACE_CHECK(found != clients_.end(), "the client was adopted and has not left");
  return found->second;
}

void LeaseBook::adopt(ClientId id, const std::string& device, Bytes hbm_budget, const TierAmounts& held) {
  TERRACE_CHECK(!clients_.contains(id), "a client is adopted once");
  Account& hbm = devices_[device];
  if (hbm.users++ == 0) hbm.budget = hbm_budget;
  Client& client = clients_[id];
  client.device = device;
  for (const TierId tier : kTiers) {
    Account& of_tier = account(client, tier);
    client.leased[index_of(tier)] = std::min(held[index_of(tier)], of_tier.budget);
    of_tier.leased += client.leased[index_of(tier)];
  }
}

void LeaseBook::leave(ClientId id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  const Client& client = found->second;
  for (const TierId tier : kTiers) account(client, tier).leased -= client.leased[index_of(tier)];
  const auto device = devices_.find(client.device);
  if (--device->second.users == 0) devices_.erase(device);
  clients_.erase(found);
}

Bytes LeaseBook::request(ClientId id, TierId tier, Bytes wanted) {
  Client& client = known(id);
  Account& of_tier = account(client, tier);
  const Bytes granted = std::min(wanted, saturating_sub(of_tier.budget, of_tier.leased));
  of_tier.leased += granted;
  client.leased[index_of(tier)] += granted;
  return granted;
}

Bytes LeaseBook::release(ClientId id, TierId tier, Bytes bytes) {
  Client& client = known(id);
  const Bytes taken = std::min(bytes, client.leased[index_of(tier)]);
  client.leased[index_of(tier)] -= taken;
  account(client, tier).leased -= taken;
  return taken;
}

Bytes LeaseBook::leased(ClientId id, TierId tier) const {
  const auto found = clients_.find(id);
  return found == clients_.end() ? Bytes() : found->second.leased[index_of(tier)];
}
Bytes LeaseBook::budget(ClientId id, TierId tier) const { return account(known(id), tier).budget; }
Bytes LeaseBook::free(ClientId id, TierId tier) const {
  const Account& of_tier = account(known(id), tier);
  return saturating_sub(of_tier.budget, of_tier.leased);
}

Bytes LeaseBook::leased(TierId tier) const {
  if (tier != TierId::kHbm) return node_[index_of(tier)].leased;
  Bytes sum;
  for (const auto& [name, hbm] : devices_) sum += hbm.leased;
  return sum;
}
Bytes LeaseBook::budget(TierId tier) const {
  if (tier != TierId::kHbm) return node_[index_of(tier)].budget;
  Bytes sum;
  for (const auto& [name, hbm] : devices_) sum += hbm.budget;
  return sum;
}

}  // namespace terrace
