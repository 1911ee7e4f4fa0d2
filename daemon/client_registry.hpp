// The processes that terraced knows: their leases, what their metrics pages say, and what ended ones leave.
//
// A client is its page: one that comes back with the same page, after a broken connection, continues its
// counters. Counters of a job never fall: what an ended client has counted stays in its job's total. Job
// labels are bounded; jobs beyond kMaxJobs share "other". A label is its first user's: where another user
// takes the same name, theirs is NAME:UID, so that nobody counts, or is granted, under somebody else's. Every
// method may be called from any thread.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/driver_memory.hpp"
#include "daemon/lease_book.hpp"
#include "daemon/link_leases.hpp"
#include "runtime/metrics.hpp"
#include "runtime/shared_page.hpp"
#include "runtime/wire.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {

inline constexpr std::size_t kMaxJobs = 64;
inline constexpr std::size_t kMaxJobsOfUser = 32;
inline constexpr std::size_t kMaxClients = 512;
inline constexpr std::size_t kMaxClientsOfUser = 256;
inline constexpr std::size_t kMaxEnded = 256;  // ended clients remembered one by one

using SlotValues = std::array<std::uint64_t, kMetricSlots>;
using GroupFetches = std::map<std::string, SiteGroups::Counts>;  // by name of the site group

class ClientRegistry {
 public:
  // What a reload of the policy changes.
  struct Limits {
    TierAmounts node_budgets;             // every tier but HBM
    std::optional<Bytes> hbm_per_device;  // none: hbm_budget of the capacity that the first client states
    Amount hbm_budget = Amount::of_share(0.9);
    std::vector<JobRule> jobs;  // the first that matches a job decides
  };
  struct Options : Limits {
    std::map<int, Bytes> numa;  // as LeaseBook::Options
    LeaseAccount::Manners manners;
    DriverMemory driver_memory;  // empty: nobody can be asked, and an ended client's HBM counts as free
  };
  explicit ClientRegistry(const Options& options);

  struct Process {  // as the kernel names it
    pid_t pid = 0;
    uid_t uid = 0;
    std::string user;  // its name, or the number
  };
  struct Joined {
    ClientId client;
    std::optional<ClientId> replaced;  // the client's earlier connection, struck out by this call
    TierAmounts budget;
    TierAmounts leased;
    std::optional<LinkLeases::Seat> link_seat;
  };
  // Errors: kOutOfMemory (too many clients, or of this user), kProtocol (another process has that page).
  [[nodiscard]] Result<Joined> join(const Hello& hello, const Process& process,
                                    std::unique_ptr<SharedPageReader> page);
  void leave(ClientId client);
  // New limits for those who are here and those who come.
  void set_limits(const Limits& limits);

  // As LeaseBook; an unknown client is granted nothing.
  struct Grant {
    Bytes granted, leased;
    bool coming = false;
  };
  [[nodiscard]] Grant request(ClientId client, const LeaseRequest& request, LeaseBook::Time now);
  Grant release(ClientId client, const Release& release);
  Grant answer(ClientId client, const ShrinkReply& reply, LeaseBook::Time now);
  // Notes how the clients of a process shall treat new work, and returns who they are. `only`: those of this
  // user.
  [[nodiscard]] std::vector<ClientId> steer(pid_t pid, Course course, std::optional<uid_t> only);
  [[nodiscard]] std::vector<LeaseEvent> settle(LeaseBook::Time now);
  [[nodiscard]] std::optional<LeaseBook::Time> due() const;
  // Does what is due by itself, now and at look_due(): divides the links' time, asks the driver whether what
  // ended clients held is free.
  void look(Nanoseconds now);
  [[nodiscard]] std::optional<Nanoseconds> look_due() const;
  [[nodiscard]] Bytes leased(ClientId client, TierId tier) const;
  [[nodiscard]] std::size_t clients() const;
  [[nodiscard]] std::size_t deaf_clients() const;

  struct Record {
    std::uint64_t client = 0;
    pid_t pid = 0;
    uid_t uid = 0;
    std::string user;
    std::string job;
    std::string device;
    std::uint64_t run = 0;
    std::uint64_t page = 0;  // SharedPageReader::identity()
    TierAmounts leased, waiting;
    LinkAmounts link{};  // leased, of its device's
    bool deaf = false;
    Course course = Course::kTiering;
    SlotValues values{};
    GroupFetches groups;
  };
  struct JobTotals {
    SlotValues values{};  // by slot, as the metric's type adds up
    GroupFetches groups;  // at most SiteGroups::kRows
    TierAmounts leased;
    std::size_t clients = 0;
  };
  struct View {
    std::vector<Record> live;               // the longest registered first
    std::vector<Record> ended;              // the last ended first
    std::map<std::string, JobTotals> jobs;  // by label
    std::size_t clients = 0;                // live ones, also where some are left out of `live`
    std::vector<LeaseBook::AccountView> accounts;
    TierAmounts budget;
    TierAmounts leased;
    std::uint64_t joined_total = 0;
  };
  enum class Ended : std::uint8_t { kListed, kLeftOut };  // View::ended
  [[nodiscard]] View view(Ended ended = Ended::kListed);

 private:
  struct Client {
    Record record;
    std::unique_ptr<SharedPageReader> page;
    Bytes capacity;                         // of its device, as it says
    std::optional<Nanoseconds> granted_at;  // HBM, last
  };
  [[nodiscard]] std::string label_for(const std::string& job, uid_t uid);
  void set_terms_of(const Record& record);
  [[nodiscard]] Bytes hbm_budget_for(Bytes capacity) const;
  [[nodiscard]] TierAmounts budget_of(ClientId client) const;
  [[nodiscard]] TierAmounts leased_by(ClientId client) const;
  [[nodiscard]] Bytes unbacked_on(const std::string& device) const;
  void ask_drivers();
  void refresh(Client& client);
  void end(ClientId client);
  [[nodiscard]] std::optional<Record> take_back(std::uint64_t page, pid_t pid);

  Limits limits_;  // under mutex_, as all below
  mutable std::mutex mutex_;
  LeaseBook book_;
  LinkLeases links_;
  DriverMemory driver_memory_;
  Nanoseconds drivers_asked_at_{0};
  std::uint64_t next_client_ = 1;
  std::map<ClientId, Client> clients_;
  std::deque<Record> ended_;  // the last ended first
  struct Kept {
    SlotValues values{};
    GroupFetches groups;
  };
  std::map<std::string, Kept> kept_;  // counters of ended clients, for every label ever given out
  std::map<std::string, uid_t> label_owners_;
};

}  // namespace terrace
