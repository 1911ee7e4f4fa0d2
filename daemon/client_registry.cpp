#include "daemon/client_registry.hpp"

#include <algorithm>

#include "daemon/saturating_add.hpp"

namespace terrace {
namespace {

constexpr std::array kTiers = {TierId::kHbm, TierId::kPeer, TierId::kDdr, TierId::kNvme};
constexpr const char* kOtherJobs = "other";
// A client that was granted memory and shows none in its page by then does not count there.
constexpr Nanoseconds kTakesUntil = std::chrono::seconds(10);
constexpr Nanoseconds kAskDrivers = std::chrono::milliseconds(50);  // how often, while there is reason to
constexpr Bytes kLargestDevice = Bytes(1ULL << 44);  // a stated capacity beyond 16 TiB is not believed

// Calls `use(slot)` for every slot of counters, or of what isn't one.
template <typename Use>
void for_each_slot(Use use) {
  for (const MetricInfo& info : metric_table()) {
    for (std::size_t slot = info.first_slot; slot < info.first_slot + info.slots; ++slot) use(info, slot);
  }
}

// Where the fetches of a group add up in its job: the job's labels are bounded.
SiteGroups::Counts& group_in(GroupFetches& groups, const std::string& name) {
  const bool room = groups.contains(name) || groups.size() < SiteGroups::kOther;
  return groups[room ? name : SiteGroups::kOtherName];
}

void add_groups(GroupFetches& to, const GroupFetches& from) {
  for (const auto& [name, counts] : from) {
    SiteGroups::Counts& sums = group_in(to, name);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = saturating_add(sums[i], counts[i]);
  }
}

}  // namespace

ClientRegistry::ClientRegistry(const Options& options)
    : limits_(options),
      book_(LeaseBook::Options{.node_budgets = options.node_budgets,
                               .numa = options.numa,
                               .manners = options.manners,
                               .driver_tells =
                                   [this](const std::string& device) {
                                     return driver_memory_ && driver_memory_(device).has_value();
                                   }}),
      driver_memory_(options.driver_memory) {}

std::string ClientRegistry::label_for(const std::string& job, uid_t uid) {
  const auto owner = label_owners_.find(job);
  const bool taken = owner != label_owners_.end() && owner->second != uid;
  const std::string wanted = taken ? job + ":" + std::to_string(uid) : job;
  const auto known = label_owners_.find(wanted);
  if (known != label_owners_.end() && known->second == uid) return wanted;
  const auto owned = std::count_if(label_owners_.begin(), label_owners_.end(),
                                   [uid](const auto& label) { return label.second == uid; });
  // Another user's job may have that very name.
  const bool room = known == label_owners_.end() && kept_.size() < kMaxJobs &&
                    static_cast<std::size_t>(owned) < kMaxJobsOfUser;
  const std::string label = room ? wanted : kOtherJobs;
  kept_.try_emplace(label);
  if (room && label != kOtherJobs) label_owners_.emplace(label, uid);
  return label;
}

Bytes ClientRegistry::hbm_budget_for(Bytes capacity) const {
  if (limits_.hbm_per_device) return *limits_.hbm_per_device;
  const Bytes whole = std::min(capacity, kLargestDevice);
  return limits_.hbm_budget.resolve(whole, whole);
}

// What the policy says of the job that the record is of; jobs without a label of their own get nothing
// special.
void ClientRegistry::set_terms_of(const Record& record) {
  LeaseTerms terms;
  LinkTerms link_terms;
  for (const JobRule& rule : limits_.jobs) {
    if (record.job == kOtherJobs || !glob_matches(rule.match, record.job)) continue;
    if (!rule.user.empty() && rule.user != record.user) continue;
    terms = {static_cast<std::uint32_t>(rule.priority), rule.hbm_guarantee, rule.ddr_guarantee};
    link_terms = {terms.weight, static_cast<std::uint32_t>(rule.link_guarantee * kLinkWhole)};
    break;
  }
  book_.set_terms(record.job, terms);
  links_.set_terms(record.job, link_terms);
}

void ClientRegistry::set_limits(const Limits& limits) {
  const std::lock_guard lock(mutex_);
  limits_ = limits;
  std::map<std::string, Bytes> hbm;
  for (const auto& [id, client] : clients_)
    hbm.try_emplace(client.record.device, hbm_budget_for(client.capacity));
  book_.set_budgets(limits_.node_budgets, hbm);
  for (const auto& [id, client] : clients_) set_terms_of(client.record);
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
  GroupFetches groups;
  for (const auto& [name, counts] : client.page->site_groups()) add_groups(groups, {{name, counts}});
  for (const auto& [name, counts] : groups) {
    SiteGroups::Counts& known = group_in(client.record.groups, name);
    for (std::size_t i = 0; i < known.size(); ++i) known[i] = std::max(known[i], counts[i]);
  }
}

// What a page had counted when its client ended, no longer part of the kept totals: the client is back.
std::optional<ClientRegistry::Record> ClientRegistry::take_back(std::uint64_t page, pid_t pid) {
  const auto found = std::find_if(ended_.begin(), ended_.end(), [&](const Record& record) {
    return record.page == page && record.pid == pid;
  });
  if (found == ended_.end()) return std::nullopt;
  Record back = std::move(*found);
  ended_.erase(found);
  Kept& kept = kept_.at(back.job);
  for_each_slot([&](const MetricInfo& info, std::size_t slot) {
    if (info.type == MetricType::kCounter)
      kept.values[slot] -= std::min(kept.values[slot], back.values[slot]);
  });
  for (const auto& [name, counts] : back.groups) {
    SiteGroups::Counts& sums = group_in(kept.groups, name);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] -= std::min(sums[i], counts[i]);
  }
  return back;
}

Result<ClientRegistry::Joined> ClientRegistry::join(const Hello& hello, const Process& process,
                                                    std::unique_ptr<SharedPageReader> page) {
  const std::lock_guard lock(mutex_);
  Joined joined;
  std::size_t of_user = 0;
  for (const auto& [id, other] : clients_) {
    if (other.record.uid == process.uid) ++of_user;
    if (other.record.page != page->identity()) continue;
    if (other.record.pid != process.pid)
      return Error{Errc::kProtocol, "another process has registered this page"};
    joined.replaced = id;
  }
  if (joined.replaced) end(*joined.replaced);
  if (clients_.size() >= kMaxClients) return Error{Errc::kOutOfMemory, "the daemon has its limit of clients"};
  if (of_user >= kMaxClientsOfUser + (joined.replaced ? 1 : 0))
    return Error{Errc::kOutOfMemory,
                 "this user has its limit of " + std::to_string(kMaxClientsOfUser) + " clients"};
  joined.client = ClientId{next_client_++};
  std::optional<Record> before = take_back(page->identity(), process.pid);
  Client client;
  client.record.client = joined.client.value;
  client.record.pid = process.pid;
  client.record.uid = process.uid;
  client.record.user = process.user;
  client.record.job = label_for(clean_job_name(hello.job.view()), process.uid);
  client.record.device = hello.device.view().empty() ? "0" : clean_job_name(hello.device.view());
  client.record.run = hello.run;
  client.record.page = page->identity();
  client.record.course = hello.course;
  if (before) {
    client.record.values = before->values;
    client.record.groups = std::move(before->groups);
  }
  client.page = std::move(page);
  client.capacity = Bytes(hello.capacity);
  set_terms_of(client.record);
  LeaseBook::Newcomer newcomer{.job = client.record.job,
                               .device = client.record.device,
                               .hbm_budget = hbm_budget_for(client.capacity),
                               .numa_node = hello.numa_node};
  for (std::size_t tier = 0; tier < kTierCount; ++tier) newcomer.held[tier] = Bytes(hello.held[tier]);
  book_.adopt(joined.client, newcomer);
  joined.link_seat = links_.enter(joined.client, {client.record.device, client.record.job, process.uid},
                                  steady_clock().now());
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
  record.leased = record.waiting = {};
  record.link = {};
  record.deaf = false;
  Kept& kept = kept_.at(record.job);
  for_each_slot([&](const MetricInfo& info, std::size_t slot) {
    std::uint64_t& sum = kept.values[slot];
    if (info.type == MetricType::kCounter) sum = saturating_add(sum, record.values[slot]);
  });
  add_groups(kept.groups, record.groups);
  ended_.push_front(std::move(record));
  if (ended_.size() > kMaxEnded) ended_.pop_back();
  clients_.erase(found);
  book_.leave(id);
  links_.leave(id, steady_clock().now());
  ask_drivers();
}

// HBM that live clients were granted and have not taken of the driver yet, as far as they count it.
Bytes ClientRegistry::unbacked_on(const std::string& device) const {
  Bytes unbacked;
  for (const auto& [id, client] : clients_) {
    if (client.record.device != device) continue;
    const auto slot = [&page = *client.page](Metric metric, std::size_t index) {
      return Bytes(page.raw(first_slot(metric) + index));
    };
    constexpr auto kHbm = static_cast<std::size_t>(TierId::kHbm);
    Bytes backed = slot(Metric::kTierMappedBytes, kHbm), live;
    for (std::size_t pool = 0; pool < kPoolCount; ++pool)
      live += std::min(slot(Metric::kTierBytes, kHbm * kPoolCount + pool), kLargestDevice);
    backed = std::max(backed, live);
    const bool takes = client.granted_at && steady_clock().now() - *client.granted_at < kTakesUntil;
    if (backed > 0_B || takes) unbacked += saturating_sub(book_.leased(id, TierId::kHbm), backed);
  }
  return unbacked;
}

void ClientRegistry::ask_drivers() {
  for (const std::string& device : book_.withholding()) {
    const auto free = driver_memory_(device);
    book_.show_free(device, free ? saturating_sub(*free, unbacked_on(device)) : kLargestDevice);
  }
}

void ClientRegistry::look(Nanoseconds now) {
  const std::lock_guard lock(mutex_);
  links_.look(now);
  if (now - drivers_asked_at_ < kAskDrivers) return;
  drivers_asked_at_ = now;
  ask_drivers();
}

std::optional<Nanoseconds> ClientRegistry::look_due() const {
  const std::lock_guard lock(mutex_);
  std::optional<Nanoseconds> first = links_.due();
  if (book_.withholding().empty()) return first;
  const Nanoseconds next = drivers_asked_at_ + kAskDrivers;
  return first ? std::min(*first, next) : next;
}

void ClientRegistry::leave(ClientId client) {
  const std::lock_guard lock(mutex_);
  end(client);
}

ClientRegistry::Grant ClientRegistry::request(ClientId client, const LeaseRequest& request,
                                              LeaseBook::Time now) {
  const std::lock_guard lock(mutex_);
  if (!clients_.contains(client)) return {};
  const auto tier = static_cast<TierId>(request.tier);
  const Bytes granted = book_.request(client, tier, Bytes(request.wanted), request.unmet, now);
  if (granted > 0_B && tier == TierId::kHbm) clients_.at(client).granted_at = steady_clock().now();
  return {granted, book_.leased(client, tier), book_.coming(client, tier)};
}
ClientRegistry::Grant ClientRegistry::release(ClientId client, const Release& release) {
  const std::lock_guard lock(mutex_);
  if (!clients_.contains(client)) return {};
  const auto tier = static_cast<TierId>(release.tier);
  (void)book_.release(client, tier, Bytes(release.bytes));
  return {{}, book_.leased(client, tier), book_.coming(client, tier)};
}
ClientRegistry::Grant ClientRegistry::answer(ClientId client, const ShrinkReply& reply, LeaseBook::Time now) {
  const std::lock_guard lock(mutex_);
  if (!clients_.contains(client)) return {};
  const auto tier = static_cast<TierId>(reply.tier);
  (void)book_.answer(client, {tier, reply.ask, Bytes(reply.released)}, now);
  return {{}, book_.leased(client, tier), book_.coming(client, tier)};
}
std::vector<ClientId> ClientRegistry::steer(pid_t pid, Course course, std::optional<uid_t> only) {
  const std::lock_guard lock(mutex_);
  std::vector<ClientId> concerned;
  for (auto& [id, client] : clients_) {
    if (client.record.pid != pid || (only && client.record.uid != *only)) continue;
    client.record.course = course;
    concerned.push_back(id);
  }
  return concerned;
}
std::vector<LeaseEvent> ClientRegistry::settle(LeaseBook::Time now) {
  const std::lock_guard lock(mutex_);
  auto events = book_.settle(now);
  for (const LeaseEvent& event : events) {
    const auto found = clients_.find(event.client);
    if (event.what == LeaseEvent::What::kGrant && event.tier == TierId::kHbm && event.bytes > 0_B &&
        found != clients_.end())
      found->second.granted_at = steady_clock().now();
  }
  return events;
}
std::optional<LeaseBook::Time> ClientRegistry::due() const {
  const std::lock_guard lock(mutex_);
  return book_.due();
}
std::size_t ClientRegistry::clients() const {
  const std::lock_guard lock(mutex_);
  return clients_.size();
}
std::size_t ClientRegistry::deaf_clients() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(std::count_if(
      clients_.begin(), clients_.end(), [this](const auto& client) { return book_.deaf(client.first); }));
}
Bytes ClientRegistry::leased(ClientId client, TierId tier) const {
  const std::lock_guard lock(mutex_);
  return book_.leased(client, tier);
}

ClientRegistry::View ClientRegistry::view(Ended ended) {
  const std::lock_guard lock(mutex_);
  View view;
  for (const auto& [label, kept] : kept_) {
    view.jobs[label].values = kept.values;
    view.jobs[label].groups = kept.groups;
  }
  for (auto& [id, client] : clients_) {
    refresh(client);
    client.record.leased = leased_by(id);
    for (const TierId tier : kTiers)
      client.record.waiting[static_cast<std::size_t>(tier)] = book_.waiting(id, tier);
    client.record.link = links_.leased(id);
    client.record.deaf = book_.deaf(id);
    JobTotals& job = view.jobs.at(client.record.job);
    ++job.clients;
    for_each_slot([&, &client = client](const MetricInfo& info, std::size_t slot) {  // clang 14 asks for it
      const std::uint64_t value = client.record.values[slot];
      std::uint64_t& total = job.values[slot];
      total = info.type == MetricType::kPeak ? std::max(total, value) : saturating_add(total, value);
    });
    add_groups(job.groups, client.record.groups);
    for (std::size_t tier = 0; tier < kTierCount; ++tier) job.leased[tier] += client.record.leased[tier];
    view.live.push_back(client.record);
  }
  if (ended == Ended::kListed) view.ended.assign(ended_.begin(), ended_.end());
  for (const TierId tier : kTiers) {
    view.budget[static_cast<std::size_t>(tier)] = book_.budget(tier);
    view.leased[static_cast<std::size_t>(tier)] = book_.leased(tier);
  }
  view.clients = view.live.size();
  view.accounts = book_.accounts();
  if (clients_.empty() && limits_.hbm_per_device) view.budget[0] = *limits_.hbm_per_device;
  view.joined_total = next_client_ - 1;
  return view;
}

}  // namespace terrace
