// Who holds how much of the node: its accounts (lease_account.hpp), and which of them a client uses. Pure, as
// they are.
//
// HBM has an account for each device in use, pinned memory one for each NUMA node, every other tier one. A
// client that does not say whose memory it pins is put to the NUMA node that has most left.
//
// HBM of a client that has left may be in use still, by a child that it has forked: where the driver can be
// asked, it is withheld until the driver shows that it is free.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/lease_account.hpp"
#include "runtime/result.hpp"
#include "runtime/units.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {

using TierAmounts = std::array<Bytes, kTierCount>;  // by TierId

// Of a job: how it stands to others, and what it can count on: a size, or a share of the account's budget.
struct LeaseTerms {
  std::uint32_t weight = 1;
  Amount hbm = Amount::of(Bytes());  // on each device
  Amount ddr = Amount::of(Bytes());  // on each NUMA node
  bool operator==(const LeaseTerms&) const = default;
};

class LeaseBook {
 public:
  using Time = LeaseAccount::Time;

  // Bytes of every tier but HBM. `numa` says how pinned memory is spread, by node: shares of the budget in
  // proportion to these numbers; empty: one account.
  struct Options {
    TierAmounts node_budgets{};
    std::map<int, Bytes> numa{};
    LeaseAccount::Manners manners{};
    std::function<bool(const std::string& device)> driver_tells{};  // show_free() will come; empty: never
  };
  explicit LeaseBook(const Options& options);
  explicit LeaseBook(const TierAmounts& node_budgets) : LeaseBook(Options{.node_budgets = node_budgets}) {}

  struct Newcomer {
    std::string job{};
    std::string device{};
    Bytes hbm_budget{};  // of the device, if nobody uses it yet (else the budget stays)
    int numa_node = -1;
    TierAmounts held{};  // what it has from an earlier daemon: leased, at most one budget of each tier
  };
  // Preconditions of all that name a client: adopt()'s is new, the others' entered and not left; leave()
  // ignores who isn't.
  void adopt(ClientId client, const Newcomer& newcomer);
  void leave(ClientId client);
  void set_terms(const std::string& job, const LeaseTerms& terms);
  // Of every tier but HBM, spread as before; `hbm` of each device in use by its name.
  void set_budgets(const TierAmounts& node_budgets, const std::map<std::string, Bytes>& hbm);

  // Devices of which something is withheld.
  [[nodiscard]] std::vector<std::string> withholding() const;
  // What the driver has free of one of them beyond what is leased and not backed yet.
  void show_free(const std::string& device, Bytes shown);

  // As LeaseAccount, of the account that the client uses.
  [[nodiscard]] Bytes request(ClientId client, TierId tier, Bytes wanted, Unmet unmet = Unmet::kForget,
                              Time now = Time(0));
  Bytes release(ClientId client, TierId tier, Bytes bytes);
  struct Answer {
    TierId tier = TierId::kHbm;
    std::uint64_t ask = 0;
    Bytes released;
  };
  Bytes answer(ClientId client, const Answer& answer, Time now);
  [[nodiscard]] std::vector<LeaseEvent> settle(Time now);
  [[nodiscard]] std::optional<Time> due() const;

  [[nodiscard]] Bytes leased(ClientId client, TierId tier) const;  // zero for an unknown client
  [[nodiscard]] Bytes waiting(ClientId client, TierId tier) const;
  [[nodiscard]] bool coming(ClientId client, TierId tier) const;  // room, for what it waits for
  [[nodiscard]] bool deaf(ClientId client) const;                 // in any tier
  // As the client sees it: HBM of its device, pinned memory of its NUMA node, other tiers of the node.
  [[nodiscard]] Bytes budget(ClientId client, TierId tier) const;
  [[nodiscard]] Bytes free(ClientId client, TierId tier) const;
  // Of the node: HBM summed over the devices in use.
  [[nodiscard]] Bytes leased(TierId tier) const;
  [[nodiscard]] Bytes budget(TierId tier) const;
  [[nodiscard]] std::size_t clients() const { return clients_.size(); }

  struct AccountView {
    TierId tier = TierId::kHbm;
    std::string place;  // the device, the NUMA node's number, or empty
    Bytes budget, leased, withheld;
  };
  [[nodiscard]] std::vector<AccountView> accounts() const;

 private:
  using Key = std::pair<TierId, std::string>;
  using Accounts = std::map<Key, LeaseAccount>;
  struct Client {
    std::string job;
    std::array<Key, kTierCount> keys;  // by TierId
  };
  [[nodiscard]] LeaseAccount& open(const Key& key, Bytes budget);
  void withhold(const Key& key, LeaseAccount& account, Bytes bytes);
  [[nodiscard]] Key ddr_key(int numa_node) const;
  [[nodiscard]] Bytes ddr_part(const std::string& place, Bytes whole) const;
  [[nodiscard]] const Client& known(ClientId client) const;
  [[nodiscard]] LeaseAccount& account(ClientId client, TierId tier);
  [[nodiscard]] const LeaseAccount& account(ClientId client, TierId tier) const;
  void set_terms(LeaseAccount& account, TierId tier, const std::string& job) const;

  const Options options_;
  Accounts accounts_;  // HBM ones while somebody uses the device, or something is withheld
  std::map<ClientId, Client> clients_;
  std::map<std::string, LeaseTerms> terms_;  // by job
};

}  // namespace terrace
