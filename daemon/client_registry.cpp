#include "daemon/client_registry.hpp"

#include <algorithm>

namespace terrace {
namespace {

constexpr std::array kTiers = {TierId::kHbm, TierId::kPeer, TierId::kDdr, TierId::kNvme};
constexpr Bytes kLargestDevice = Bytes(1ULL << 44);  // a stated capacity beyond 16 TiB is not believed

std::uint64_t add_saturating(std::uint64_t a, std::uint64_t b) { return a + b < a ? UINT64_MAX : a + b; }

// Calls `use(slot)` for every slot of counters, or of what isn't one.
template <typename Use>
void for_each_slot(Use use) {
  for (const MetricInfo& info : metric_table()) {
    for (std::size_t slot = info.first_slot; slot < info.first_slot + info.slots; ++slot) use(info, slot);
  }
}

}  // namespace

ClientRegistry::ClientRegistry(Options options) : options_(options), book_(options.node_budgets) {}

std::string ClientRegistry::label_for(const std::string& job) {
  if (kept_.contains(job)) return job;
  const std::string label = kept_.size() < kMaxJobs ? job : "other";
  kept_.try_emplace(label);
  return label;
}

Bytes ClientRegistry::hbm_budget_for(Bytes capacity) const {
  if (options_.hbm_per_device) return *options_.hbm_per_device;
  const Bytes whole = std::min(capacity, kLargestDevice);
  return options_.hbm_budget.resolve(whole, whole);
}

TierAmounts ClientRegistry::budget_of(ClientId client) const {
  TierAmounts amounts;
  for (const TierId tier : kTiers) amounts[static_cast<std::size_t>(tier)] = book_.budget(client, tier);
  return amounts;
}
TierAmounts ClientRegistry::leased_by(ClientId client) const {
  TierAmounts amounts;
  for (const TierId tier : kTiers) amounts[static_cast<std::size_t>(tier)] = book_.leased(client, tier);
  return amounts;
}

// A page is the client's to write, so what it says may fall; the daemon's counters don't.
void ClientRegistry::refresh(Client& client) {
  for_each_slot([&](const MetricInfo& info, std::size_t slot) {
    std::uint64_t& value = client.record.values[slot];
    const std::uint64_t now = client.page->raw(slot);
    value = info.type == MetricType::kCounter ? std::max(value, now) : now;
  });
}

// What a page had counted when its client ended, no longer part of the kept totals: the client is back.
std::optional<SlotValues> ClientRegistry::take_back(std::uint64_t page, pid_t pid) {
  const auto found = std::find_if(ended_.begin(), ended_.end(), [&](const Record& record) {
    return record.page == page && record.pid == pid;
  });
  if (found == ended_.end()) return std::nullopt;
  const SlotValues values = found->values;
  SlotValues& kept = kept_.at(found->job);
  for_each_slot([&](const MetricInfo& info, std::size_t slot) {
    if (info.type == MetricType::kCounter) kept[slot] -= std::min(kept[slot], values[slot]);
  });
  ended_.erase(found);
  return values;
}

Result<ClientRegistry::Joined> ClientRegistry::join(const Hello& hello, pid_t peer,
                                                    std::unique_ptr<SharedPageReader> page) {
  const std::lock_guard lock(mutex_);
  Joined joined;
  for (const auto& [id, other] : clients_) {
    if (other.record.page != page->identity()) continue;
    if (other.record.pid != peer) return Error{Errc::kProtocol, "another process has registered this page"};
    joined.replaced = id;
  }
  if (joined.replaced) end(*joined.replaced);
  if (clients_.size() >= kMaxClients) return Error{Errc::kOutOfMemory, "the daemon has its limit of clients"};
  joined.client = ClientId{next_client_++};
  const std::optional<SlotValues> before = take_back(page->identity(), peer);
  Client client;
  client.record.client = joined.client.value;
  client.record.pid = peer;
  client.record.job = label_for(clean_job_name(hello.job.view()));
  client.record.device = hello.device.view().empty() ? "0" : clean_job_name(hello.device.view());
  client.record.run = hello.run;
  client.record.page = page->identity();
  if (before) client.record.values = *before;
  client.page = std::move(page);
  TierAmounts held;
  for (std::size_t tier = 0; tier < kTierCount; ++tier) held[tier] = Bytes(hello.held[tier]);
  book_.adopt(joined.client, client.record.device, hbm_budget_for(Bytes(hello.capacity)), held);
  clients_.emplace(joined.client, std::move(client));
  joined.budget = budget_of(joined.client);
  joined.leased = leased_by(joined.client);
  return joined;
}

void ClientRegistry::end(ClientId id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  refresh(found->second);
  Record& record = found->second.record;
  record.leased = {};
  SlotValues& kept = kept_.at(record.job);
  for_each_slot([&](const MetricInfo& info, std::size_t slot) {
    if (info.type == MetricType::kCounter) kept[slot] = add_saturating(kept[slot], record.values[slot]);
  });
  ended_.push_front(std::move(record));
  if (ended_.size() > kMaxEnded) ended_.pop_back();
  clients_.erase(found);
  book_.leave(id);
}

void ClientRegistry::leave(ClientId client) {
  const std::lock_guard lock(mutex_);
  end(client);
}

Bytes ClientRegistry::request(ClientId client, TierId tier, Bytes wanted) {
  const std::lock_guard lock(mutex_);
  return clients_.contains(client) ? book_.request(client, tier, wanted) : Bytes();
}
Bytes ClientRegistry::release(ClientId client, TierId tier, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  return clients_.contains(client) ? book_.release(client, tier, bytes) : Bytes();
}
Bytes ClientRegistry::leased(ClientId client, TierId tier) const {
  const std::lock_guard lock(mutex_);
  return book_.leased(client, tier);
}

ClientRegistry::View ClientRegistry::view() {
  const std::lock_guard lock(mutex_);
  View view;
  for (const auto& [label, kept] : kept_) view.jobs[label].values = kept;
  for (auto& [id, client] : clients_) {
    refresh(client);
    client.record.leased = leased_by(id);
    JobTotals& job = view.jobs.at(client.record.job);
    ++job.clients;
    for_each_slot([&](const MetricInfo& info, std::size_t slot) {
      const std::uint64_t value = client.record.values[slot];
      std::uint64_t& total = job.values[slot];
      total = info.type == MetricType::kPeak ? std::max(total, value) : add_saturating(total, value);
    });
    for (std::size_t tier = 0; tier < kTierCount; ++tier) job.leased[tier] += client.record.leased[tier];
    view.live.push_back(client.record);
  }
  view.ended.assign(ended_.begin(), ended_.end());
  for (const TierId tier : kTiers) {
    view.budget[static_cast<std::size_t>(tier)] = book_.budget(tier);
    view.leased[static_cast<std::size_t>(tier)] = book_.leased(tier);
  }
  if (clients_.empty() && options_.hbm_per_device) view.budget[0] = *options_.hbm_per_device;
  view.joined_total = next_client_ - 1;
  return view;
}

}  // namespace terrace
