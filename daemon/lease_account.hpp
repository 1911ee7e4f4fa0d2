// One budget that clients share, as a state machine without clock, socket or lock: a device's HBM, a NUMA
// node's pinned memory.
//
// What is free is granted at once. A request that asks for more can wait: then everyone's fair share is
// worked out (fair_shares.hpp: first among jobs by weight, then evenly among a job's clients), and who holds
// more than its share is asked to give way. Asked clients go on holding their lease until they answer, so
// that the sum of leases never exceeds the budget; only enter() and a lowered budget may find it exceeded,
// and then nothing is granted until enough has come back.
//
// A job's guarantee holds from its first client on: nothing of it is granted to others, and nobody is asked
// to go below its own. A client that does not answer in time is deaf: memory can't be taken from a process,
// so it keeps what it holds, is asked for nothing and granted no more than its job's guarantee, until it
// answers. One that answers with less than it was asked for needs the rest; it is asked again after a while.
//
// Part of the budget can be withheld: what ended clients were leased and the driver does not show free yet.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/fair_shares.hpp"
#include "runtime/units.hpp"
#include "runtime/wire.hpp"

namespace terrace {

struct ClientId {
  std::uint64_t value = 0;
  auto operator<=>(const ClientId&) const = default;
};

// What a client is to be told.
struct LeaseEvent {
  enum class What : std::uint8_t {
    kGrant,   // `bytes` more of what it waits for; zero: nothing more is coming
    kShrink,  // it shall come down to `bytes`
    kDeaf,    // nothing, but that it did not answer is worth a report
  };
  What what = What::kGrant;
  ClientId client;
  TierId tier = TierId::kHbm;
  Bytes bytes;
  std::uint64_t ask = 0;  // kShrink
  bool coming = false;    // kGrant: others have been asked for more
};

class LeaseAccount {
 public:
  using Time = std::chrono::milliseconds;  // since whenever, never back
  struct Manners {
    Time patience{10000};    // for an answer to kShrink
    Time retry_after{1000};  // before who needed what it held is asked again
  };
  struct Terms {  // of a job
    std::uint32_t weight = 1;
    Bytes guarantee;
  };

  LeaseAccount(TierId tier, Bytes budget, Manners manners)
      : tier_(tier), manners_(manners), budget_(budget) {}

  // `held` counts as leased, at most one budget. Preconditions: the client is new; those of the others: it is
  // entered.
  void enter(ClientId client, const std::string& job, Bytes held);
  void leave(ClientId client);
  // Of a job now and for later clients.
  void set_terms(const std::string& job, Terms terms);
  void set_budget(Bytes budget);
  // Nobody is granted so much of the budget, and it is no part of anybody's share. At most what is not
  // leased.
  void withhold(Bytes bytes);

  // Leases as much of `wanted` as is free and nobody else's. What a kept request lacks is granted by
  // settle(); the client's next kept request replaces it. Returns what this call granted.
  [[nodiscard]] Bytes request(ClientId client, Bytes wanted, Unmet unmet, Time now);
  // Takes back at most what the client holds, and returns it.
  Bytes release(ClientId client, Bytes bytes);
  // The same, as the answer to kShrink. What a client gave back that waits for more, it waits for again.
  Bytes answer(ClientId client, std::uint64_t ask, Bytes released, Time now);

  // Adds what has come of all this, and of the time: call it after every change, and at due().
  void settle(Time now, std::vector<LeaseEvent>& events);
  // When something happens by itself, if anything will.
  [[nodiscard]] std::optional<Time> due() const { return due_; }

  [[nodiscard]] Bytes budget() const { return budget_; }
  [[nodiscard]] Bytes withheld() const { return withheld_; }
  [[nodiscard]] Bytes leased() const { return leased_; }
  [[nodiscard]] Bytes leased(ClientId client) const;  // zero for an unknown one
  [[nodiscard]] Bytes waiting(ClientId client) const;
  [[nodiscard]] bool deaf(ClientId client) const;
  [[nodiscard]] bool coming() const;  // somebody has been asked and not answered yet
  [[nodiscard]] bool empty() const { return members_.empty(); }

 private:
  struct Ask {
    std::uint64_t number = 0;
    Bytes target;
    Time until{};
  };
  struct Member {
    ClientId client;
    std::string job;
    Bytes leased;
    Bytes waiting;       // of a kept request, not granted yet
    bool keeps = false;  // it has made one
    bool deaf = false;
    bool told_coming = false;
    std::optional<Ask> ask;
    std::optional<Time> declined_until;
  };
  struct Job {
    std::vector<std::size_t> members;
    Terms terms;
    Bytes leased, demand, fixed;
  };
  using Amounts = std::vector<Bytes>;  // by member

  [[nodiscard]] Member& member(ClientId client);
  [[nodiscard]] const Member* find(ClientId client) const;
  [[nodiscard]] std::vector<Job> jobs() const;
  [[nodiscard]] Bytes demand_of(const Member& member, const Terms& terms) const;
  [[nodiscard]] Terms terms_of(const std::string& job) const;
  [[nodiscard]] static bool fixed(const Member& member) { return member.deaf || member.declined_until; }
  [[nodiscard]] Amounts targets(const std::vector<Job>& jobs) const;
  [[nodiscard]] Amounts divide_free(const std::vector<Job>& jobs, const Amounts& targets) const;
  [[nodiscard]] bool all_is_well(Bytes wanted) const;
  void take_back(Member& member, Bytes bytes);
  void grant(Member& member, Bytes bytes);
  void pass_time(Time now, std::vector<LeaseEvent>& events);
  void distribute();
  void ask_for_room(Time now, std::vector<LeaseEvent>& events);
  void tell(std::vector<LeaseEvent>& events);
  void find_due();

  const TierId tier_;
  const Manners manners_;
  [[nodiscard]] Bytes usable() const { return saturating_sub(budget_, withheld_); }

  Bytes budget_, leased_, withheld_;
  std::vector<Member> members_;  // the longest entered first
  std::map<std::string, Terms> terms_;
  std::vector<LeaseEvent> untold_;
  std::uint64_t asks_ = 0;
  bool changed_ = false;
  std::optional<Time> due_;
};

}  // namespace terrace
