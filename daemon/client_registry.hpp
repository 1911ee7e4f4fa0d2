// The processes that terraced knows: their leases, what their metrics pages say, and what ended ones leave.
//
// A client is its page: one that comes back with the same page, after a broken connection, continues its
// counters. Counters of a job never fall: what an ended client has counted stays in its job's total. Job
// labels are bounded; jobs beyond kMaxJobs share "other". Every method may be called from any thread.
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

#include "daemon/lease_book.hpp"
#include "runtime/metrics.hpp"
#include "runtime/shared_page.hpp"
#include "runtime/wire.hpp"
#include "swapcore/policy/policy.hpp"

namespace terrace {

inline constexpr std::size_t kMaxJobs = 64;
inline constexpr std::size_t kMaxClients = 512;
inline constexpr std::size_t kMaxEnded = 256;  // ended clients remembered one by one

using SlotValues = std::array<std::uint64_t, kMetricSlots>;

class ClientRegistry {
 public:
  struct Options {
    TierAmounts node_budgets;             // every tier but HBM
    std::optional<Bytes> hbm_per_device;  // none: hbm_budget of the capacity that the first client states
    Amount hbm_budget = Amount::of_share(0.9);
  };
  explicit ClientRegistry(Options options);

  struct Joined {
    ClientId client;
    std::optional<ClientId> replaced;  // the client's earlier connection, struck out by this call
    TierAmounts budget;
    TierAmounts leased;
  };
  // `peer` is the process as the kernel names it. Errors: kOutOfMemory (too many clients), kProtocol (another
  // process has that page).
  [[nodiscard]] Result<Joined> join(const Hello& hello, pid_t peer, std::unique_ptr<SharedPageReader> page);
  void leave(ClientId client);

  // As LeaseBook; an unknown client is granted nothing.
  [[nodiscard]] Bytes request(ClientId client, TierId tier, Bytes wanted);
  Bytes release(ClientId client, TierId tier, Bytes bytes);
  [[nodiscard]] Bytes leased(ClientId client, TierId tier) const;

  struct Record {
    std::uint64_t client = 0;
    pid_t pid = 0;
    std::string job;
    std::string device;
    std::uint64_t run = 0;
    std::uint64_t page = 0;  // SharedPageReader::identity()
    TierAmounts leased;
    SlotValues values{};
  };
  struct JobTotals {
    SlotValues values{};  // by slot, as the metric's type adds up
    TierAmounts leased;
    std::size_t clients = 0;
  };
  struct View {
    std::vector<Record> live;               // the longest registered first
    std::vector<Record> ended;              // the last ended first
    std::map<std::string, JobTotals> jobs;  // by label
    TierAmounts budget;
    TierAmounts leased;
    std::uint64_t joined_total = 0;
  };
  [[nodiscard]] View view();

 private:
  struct Client {
    Record record;
    std::unique_ptr<SharedPageReader> page;
  };
  [[nodiscard]] std::string label_for(const std::string& job);
  [[nodiscard]] Bytes hbm_budget_for(Bytes capacity) const;
  [[nodiscard]] TierAmounts budget_of(ClientId client) const;
  [[nodiscard]] TierAmounts leased_by(ClientId client) const;
  void refresh(Client& client);
  void end(ClientId client);
  [[nodiscard]] std::optional<SlotValues> take_back(std::uint64_t page, pid_t pid);

  const Options options_;
  mutable std::mutex mutex_;
  LeaseBook book_;
  std::uint64_t next_client_ = 1;
  std::map<ClientId, Client> clients_;
  std::deque<Record> ended_;                // the last ended first
  std::map<std::string, SlotValues> kept_;  // counters of ended clients, for every label ever given out
};

}  // namespace terrace
