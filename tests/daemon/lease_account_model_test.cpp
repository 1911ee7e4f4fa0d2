// Random schedules of one account, by seed: what is promised holds after every step, and where everybody
// answers, leases come to what a plain reference says is fair.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "daemon/lease_account.hpp"
#include "tests/daemon/fair_reference.hpp"

namespace terrace {
namespace {

using Time = LeaseAccount::Time;

constexpr unsigned kSchedules = 12000;
constexpr int kSteps = 30;
constexpr std::uint64_t kMostWeight = 4;

struct ModelClient {
  ClientId id;
  std::string job;
  std::uint64_t leased = 0;
  struct Ask {
    std::uint64_t number, target;
  };
  std::optional<Ask> ask;
};

class Schedule {
 public:
  explicit Schedule(unsigned seed)
      : random_(seed),
        budget_(50 + random_() % 250),
        account_(TierId::kDdr, Bytes(budget_), {.patience = Time(40), .retry_after = Time(15)}) {
    std::uint64_t promised = 0;
    for (const char* job : {"a", "b", "c"}) {
      LeaseAccount::Terms terms{1 + static_cast<std::uint32_t>(random_() % kMostWeight), 0_B};
      if (random_() % 3 == 0) terms.guarantee = Bytes(random_() % (budget_ - promised));
      promised += terms.guarantee.count();
      terms_[job] = terms;
      account_.set_terms(job, terms);
    }
  }

  void run() {
    for (int step = 0; step < kSteps && !testing::Test::HasFatalFailure(); ++step) {
      act();
      settle();
      check();
    }
    come_to_rest();
    if (!testing::Test::HasFatalFailure()) compare();
  }

 private:
  std::uint64_t below(std::uint64_t bound) { return bound == 0 ? 0 : random_() % bound; }
  ModelClient& anyone() { return clients_[below(clients_.size())]; }
  std::uint64_t leased_by(const std::string& job) const {
    std::uint64_t sum = 0;
    for (const ModelClient& client : clients_) sum += client.job == job ? client.leased : 0;
    return sum;
  }
  std::uint64_t leased() const {
    std::uint64_t sum = 0;
    for (const ModelClient& client : clients_) sum += client.leased;
    return sum;
  }

  void act() {
    const std::uint64_t action = below(10);
    if (clients_.empty() || (action == 0 && clients_.size() < 6)) {
      const ModelClient client{ClientId{next_++}, std::string(1, static_cast<char>('a' + below(3))), 0, {}};
      account_.enter(client.id, client.job, 0_B);
      clients_.push_back(client);
    } else if (action == 1 && below(3) == 0) {
      const std::size_t gone = below(clients_.size());
      account_.leave(clients_[gone].id);
      clients_.erase(clients_.begin() + static_cast<std::ptrdiff_t>(gone));
    } else if (action < 6) {
      ModelClient& client = anyone();
      const Bytes wanted(below(budget_ + 20));
      const Bytes granted =
          account_.request(client.id, wanted, below(3) == 0 ? Unmet::kForget : Unmet::kKeep, now_);
      ASSERT_LE(granted, wanted);
      grown(client, granted.count());
    } else if (action == 6) {
      ModelClient& client = anyone();
      client.leased -= account_.release(client.id, Bytes(below(budget_ / 2))).count();
    } else if (action == 7) {
      now_ += Time(below(60));
    } else {
      ModelClient& client = anyone();
      if (client.ask) answer(client, below(2) == 0);
    }
  }

  void answer(ModelClient& client, bool wholly) {
    const std::uint64_t asked = client.leased > client.ask->target ? client.leased - client.ask->target : 0;
    const std::uint64_t given = wholly ? asked : below(asked + 1);
    ASSERT_EQ(account_.answer(client.id, client.ask->number, Bytes(given), now_).count(), given);
    client.leased -= given;
    client.ask.reset();
  }

  // Whoever is granted something beyond its job's guarantee leaves the other jobs' alone.
  void grown(ModelClient& client, std::uint64_t bytes) {
    client.leased += bytes;
    if (bytes == 0 || leased_by(client.job) <= terms_.at(client.job).guarantee.count()) return;
    beyond_ = client.job;
  }

  void settle() {
    std::vector<LeaseEvent> events;
    account_.settle(now_, events);
    for (const LeaseEvent& event : events) {
      for (ModelClient& client : clients_) {
        if (client.id != event.client) continue;
        if (event.what == LeaseEvent::What::kGrant) grown(client, event.bytes.count());
        if (event.what == LeaseEvent::What::kDeaf) client.ask.reset();
        if (event.what == LeaseEvent::What::kShrink) {
          ASSERT_LT(event.bytes.count(), client.leased);
          client.ask = {event.ask, event.bytes.count()};
        }
      }
    }
  }

  void check() {
    ASSERT_LE(leased(), budget_);
    ASSERT_EQ(account_.leased().count(), leased());
    std::uint64_t owed = 0;
    for (const auto& [job, terms] : terms_) {
      const bool here = std::any_of(clients_.begin(), clients_.end(),
                                    [&job = job](const ModelClient& client) { return client.job == job; });
      const std::uint64_t has = leased_by(job);
      if (here && job != beyond_ && terms.guarantee.count() > has) owed += terms.guarantee.count() - has;
    }
    if (!beyond_.empty()) {
      ASSERT_GE(budget_ - leased(), owed) << "a guarantee was given to " << beyond_;
    }
    beyond_.clear();
    for (const ModelClient& client : clients_) ASSERT_EQ(account_.leased(client.id).count(), client.leased);
  }

  // Everybody answers wholly until nobody is asked.
  void come_to_rest() {
    for (int round = 0; round < 200 && !testing::Test::HasFatalFailure(); ++round) {
      bool asked = false;
      for (ModelClient& client : clients_) {
        if (account_.deaf(client.id)) (void)account_.answer(client.id, 0, 0_B, now_);
        if (!client.ask) continue;
        asked = true;
        answer(client, true);
      }
      settle();
      check();
      if (!asked && !account_.due()) return;
      now_ += Time(20);
    }
    FAIL() << "it does not come to rest";
  }

  // First among jobs, then among a job's clients, byte by byte.
  void compare() {
    std::map<std::string, Claim> by_job;
    for (const ModelClient& client : clients_) {
      Claim& claim = by_job[client.job];
      claim.demand += Bytes(client.leased) + account_.waiting(client.id);
      claim.floor = terms_.at(client.job).guarantee;
      claim.weight = terms_.at(client.job).weight;
    }
    std::vector<Claim> claims;
    for (auto& [job, claim] : by_job) {
      claim.demand = std::max(claim.demand, claim.floor);
      claims.push_back(claim);
    }
    const auto shares = test::shares_byte_by_byte(Bytes(budget_), claims);
    std::size_t next = 0;
    for (const auto& [job, claim] : by_job) compare_within(job, shares[next++]);
  }

  void compare_within(const std::string& job, Bytes share) {
    std::vector<Claim> claims;
    std::vector<const ModelClient*> members;
    for (const ModelClient& client : clients_) {
      if (client.job != job) continue;
      claims.push_back({Bytes(client.leased) + account_.waiting(client.id), 0_B, 1});
      members.push_back(&client);
    }
    const auto fair = test::shares_byte_by_byte(share, claims);
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (account_.waiting(members[i]->id) == 0_B) continue;
      ASSERT_GE(members[i]->leased + kMostWeight + 1, fair[i].count())
          << "job " << job << ", client " << members[i]->id.value << " waits for its share";
    }
  }

  std::mt19937 random_;
  std::uint64_t budget_;
  LeaseAccount account_;
  std::map<std::string, LeaseAccount::Terms> terms_;
  std::vector<ModelClient> clients_;
  std::uint64_t next_ = 1;
  Time now_{0};
  std::string beyond_;  // the job that was granted more than its guarantee in this step
};

TEST(LeaseAccountModel, PromisesHoldAndSharesComeOutFair) {
  for (unsigned seed = 0; seed < kSchedules; ++seed) {
    Schedule(seed).run();
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace terrace
