// Who holds how much of the node: lease arithmetic as a state machine without clock, socket or lock.
//
// HBM is accounted by device, every other tier by node. For every account: what is granted never makes the
// sum of leases exceed the budget. Only adopt() may find more there than the budget allows, after the budget
// was lowered between two daemons; then nothing is granted until enough has come back.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "runtime/result.hpp"
#include "runtime/units.hpp"

namespace terrace {

using TierAmounts = std::array<Bytes, kTierCount>;  // by TierId

struct ClientId {
  std::uint64_t value = 0;
  auto operator<=>(const ClientId&) const = default;
};

class LeaseBook {
 public:
  // Bytes of every tier but HBM.
  explicit LeaseBook(TierAmounts node_budgets);

  // Enters a client that uses `device`, whose HBM budget is `hbm_budget` if nobody uses it yet (else the
  // budget stays). `held` is what the client has already, from an earlier daemon; it is entered as leased, at
  // most one budget of each tier. Precondition: the id is new.
  void adopt(ClientId client, const std::string& device, Bytes hbm_budget, const TierAmounts& held);
  // Strikes a client out; all it held is free at once. Unknown ids are ignored.
  void leave(ClientId client);

  // Leases as much of `wanted` as is free, down to nothing. Returns what was granted by this call.
  // Precondition for both: the client is entered.
  [[nodiscard]] Bytes request(ClientId client, TierId tier, Bytes wanted);
  // Takes back at most what the client holds. Returns what was taken back.
  Bytes release(ClientId client, TierId tier, Bytes bytes);

  [[nodiscard]] Bytes leased(ClientId client, TierId tier) const;  // zero for an unknown client
  // As the client sees it: HBM of its device, other tiers of the node.
  [[nodiscard]] Bytes budget(ClientId client, TierId tier) const;
  [[nodiscard]] Bytes free(ClientId client, TierId tier) const;
  // Of the node: HBM summed over the devices in use.
  [[nodiscard]] Bytes leased(TierId tier) const;
  [[nodiscard]] Bytes budget(TierId tier) const;
  [[nodiscard]] std::size_t clients() const { return clients_.size(); }

 private:
  struct Account {
    Bytes budget;
    Bytes leased;
    std::size_t users = 0;
  };
  struct Client {
    std::string device;
    TierAmounts leased;
  };
  [[nodiscard]] Account& account(const Client& client, TierId tier);
  [[nodiscard]] const Account& account(const Client& client, TierId tier) const;
  [[nodiscard]] Client& known(ClientId client);
  [[nodiscard]] const Client& known(ClientId client) const;

  std::array<Account, kTierCount> node_;    // by TierId; the HBM entry is unused
  std::map<std::string, Account> devices_;  // HBM, while somebody uses the device
  std::map<ClientId, Client> clients_;
};

}  // namespace terrace
