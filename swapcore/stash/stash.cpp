#include "swapcore/stash/stash.hpp"

#include <algorithm>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/memory_limits.hpp"

namespace terrace {
namespace {

Pool pool_of(Stash::Purpose purpose) {
  switch (purpose) {
    case Stash::Purpose::kOptimizer:
      return Pool::kOptimizer;
    case Stash::Purpose::kGradient:
      return Pool::kGradient;
    case Stash::Purpose::kWeights:
      return Pool::kWeights;
    case Stash::Purpose::kActivation:
      break;
  }
  return Pool::kActivation;
}
bool of_the_update(Stash::Purpose purpose) {
  return purpose == Stash::Purpose::kOptimizer || purpose == Stash::Purpose::kGradient;
}
CopyReason reason_of(Stash::Purpose purpose, Direction direction) {
  if (of_the_update(purpose)) return CopyReason::kOptimizer;
  return direction == Direction::kD2H ? CopyReason::kSpill : CopyReason::kRestore;
}

bool over(const CopyEngine::Ticket& ticket) { return !ticket.valid() || ticket.done(); }

Error invalid(std::string text) { return Error{Errc::kInvalidArgument, std::move(text), {}, {}}; }

}  // namespace

Stash::Stash(Device& device, Options options) : device_(device), policy_(std::move(options.policy)) {}

Stash::~Stash() {
  {
    const std::lock_guard lock(mutex_);
    for (auto& [id, entry] : entries_) {
      if (entry->in.valid()) entry->in.cancel();
      entry->out.cancel();
      retired_.push_back(std::move(entry));
    }
    entries_.clear();
    // Waits also where a copy has failed: nothing of it moves any more then.
    for (const EntryRef& entry : retired_) {
      if (entry->in.valid()) (void)entry->in.synchronize();
      if (entry->out.valid()) (void)entry->out.synchronize();
    }
    reap();
    for (auto& probes : probes_) probes.reset();
  }
  if (lease_) lease_->attach(nullptr);
  ddr_.reset();
  copies_.reset();
  if (fence_) device_.destroy_event(*fence_);
}

Result<std::unique_ptr<Stash>> Stash::open(Device& device, Options options) {
  const auto host = memory_limits();
  if (!host) return host.error();
  ProcessLease::Options leasing;
  leasing.job = options.job;
  leasing.wall = options.wall;
  if (!options.join_daemon) leasing.daemon = ProcessLease::Options::Daemon::kNone;
  std::unique_ptr<Stash> stash(new Stash(device, std::move(options)));
  auto budgets = resolve_budgets(stash->policy_, device.info(), host->usable);
  if (!budgets) return std::move(budgets).error();
  leasing.budgets = stash->budgets_ = *budgets;
  auto lease = ProcessLease::join(device, std::move(leasing));
  if (!lease) return std::move(lease).error();
  stash->lease_ = *std::move(lease);
  if (Status opened = stash->open_parts(); !opened) return opened.error();
  return stash;
}

Status Stash::open_parts() {
  auto nodes = numa_nodes_of(device_.info(), policy_);
  if (!nodes) return nodes.error();
  auto pool = DdrPool::create(
      device_,
      {.budget = lease_->ddr(), .numa_nodes = std::move(nodes).value(), .huge_pages = policy_.ddr.hugepages});
  if (!pool) return pool.error();
  ddr_ = std::move(pool).value();
  lease_->attach(ddr_.get());
  auto engine = CopyEngine::create(device_);
  if (!engine) return engine.error();
  copies_ = std::move(engine).value();
  auto fence = device_.create_event();
  if (!fence) return fence.error();
  fence_ = *fence;
  for (auto& probes : probes_) probes = std::make_unique<WaitProbes>(device_);
  return {};
}

Result<Stash::EntryRef> Stash::find(EntryId id) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end())
    return Error{Errc::kNotFound, "the stash has no entry " + std::to_string(id.value), {}, {}};
  return found->second;
}

void Stash::reap() {
  retired_.remove_if([this](const EntryRef& entry) {
    if (!over(entry->in) || !over(entry->out)) return false;
    (void)ddr_->free(entry->ddr);
    return true;
  });
}

Stash::Wait Stash::wait_for(Purpose purpose) {
  if (of_the_update(purpose)) return Wait::kOptimizer;
  return purpose == Purpose::kWeights ? Wait::kWeights : Wait::kRestore;
}

void Stash::count_stall(Wait kind, double seconds) {
  if (seconds <= 0) return;
  double* const stalls[] = {&counters_.spill_stall_seconds, &counters_.restore_stall_seconds,
                            &counters_.optimizer_stall_seconds, &counters_.weights_stall_seconds};
  constexpr std::array kReasons{StallReason::kSpillBackpressure, StallReason::kRestoreLate,
                                StallReason::kOptimizerLate, StallReason::kRestoreLate};
  *stalls[static_cast<std::size_t>(kind)] += seconds;
  metrics().add<Metric::kStallSeconds>(kReasons[static_cast<std::size_t>(kind)], seconds);
}

void Stash::collect_waits() {
  for (std::size_t i = 0; i < kWaitCount; ++i) count_stall(static_cast<Wait>(i), probes_[i]->collect());
}

Status Stash::wait(User user, const Ticket& ticket, Wait kind) {
  if (user) {
    const std::lock_guard lock(mutex_);
    if (ticket.done()) return ticket.synchronize();
    return probes(kind).around(*user, [&] { return ticket.order_before(*user); });
  }
  if (ticket.done()) return ticket.synchronize();
  const double began = seconds_of(steady_clock().now());
  Status waited = ticket.synchronize();
  const std::lock_guard lock(mutex_);
  count_stall(kind, seconds_of(steady_clock().now()) - began);
  return waited;
}

// The lock is held, for the fence.
Result<Stash::Ticket> Stash::begin(User user, const CopyEngine::Request& request, const Transfer& piece) {
  CopyEngine::Request behind = request;
  if (user) {
    if (Status recorded = device_.record(*user, *fence_); !recorded) return recorded.error();
    behind.after = *fence_;
  }
  return copies_->submit(behind, {&piece, 1});
}

Result<Stash::EntryId> Stash::spill(User user, const std::byte* from, Bytes size, Purpose purpose) {
  if (from == nullptr || size == 0_B) return invalid("there are no bytes to spill");
  const std::lock_guard lock(mutex_);
  reap();
  auto block = ddr_->allocate(size, pool_of(purpose));
  if (!block && block.error().code == Errc::kOutOfBudget && lease_->reclaim_ddr())
    block = ddr_->allocate(size, pool_of(purpose));
  if (!block) return std::move(block).error();
  auto out = begin(user,
                   {.direction = Direction::kD2H,
                    .reason = reason_of(purpose, Direction::kD2H),
                    .priority = CopyPriority::kBackground},
                   {block->address, from, size});
  if (!out) {
    (void)ddr_->free(*block);
    return std::move(out).error();
  }
  auto entry = std::make_shared<Entry>();
  entry->purpose = purpose;
  entry->ddr = *block;
  entry->out = *std::move(out);
  const EntryId id{++last_};
  entries_.emplace(id, std::move(entry));
  counters_.spilled += size;
  ++counters_.spills;
  return id;
}

Status Stash::depart(User user, EntryId id) {
  auto entry = find(id);
  if (!entry) return entry.error();
  return wait(user, (*entry)->out, Wait::kSpill);
}

Result<bool> Stash::left(EntryId id) {
  auto entry = find(id);
  if (!entry) return entry.error();
  if (!(*entry)->out.done()) return false;
  if (Status arrived = (*entry)->out.synchronize(); !arrived) return arrived.error();
  return true;
}

Status Stash::lost(const Entry& entry) const {
  if (!entry.out.done()) return {};
  const Status left = entry.out.synchronize();
  if (left) return {};
  return Error{Errc::kIo, "bytes were lost on their way to DDR: " + left.error().text, {}, {}};
}

Status Stash::restore(User user, EntryId id, Address to) {
  if (to == nullptr) return invalid("there is no memory to restore to");
  auto found = find(id);
  if (!found) return found.error();
  Entry& entry = **found;
  // What came before is given back, perhaps, before it has arrived: it still arrives first.
  if (!over(entry.in)) {
    const Status ordered = user ? entry.in.order_before(*user) : entry.in.synchronize();
    if (!ordered) return ordered;
  }
  if (Status held = lost(entry); !held) return held;
  // Home before it leaves home: the user may be another than the one that departed.
  if (!entry.out.done()) {
    const Status ordered = user ? entry.out.order_before(*user) : entry.out.synchronize();
    if (!ordered) return ordered;
  }
  const std::lock_guard lock(mutex_);
  auto in = begin(user,
                  {.direction = Direction::kH2D,
                   .reason = reason_of(entry.purpose, Direction::kH2D),
                   .priority = CopyPriority::kBackground},
                  {to, entry.ddr.address, entry.ddr.size});
  if (!in) return std::move(in).error();
  entry.in = *std::move(in);
  counters_.restored += entry.ddr.size;
  ++counters_.restores;
  return {};
}

Status Stash::await(User user, EntryId id) {
  auto found = find(id);
  if (!found) return found.error();
  const Entry& entry = **found;
  if (!entry.in.valid()) return invalid("the entry was never restored");
  if (Status there = wait(user, entry.in, wait_for(entry.purpose)); !there) return there;
  return lost(entry);
}

Status Stash::drop(User user, EntryId id) {
  EntryRef entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(id);
    if (found == entries_.end())
      return Error{Errc::kNotFound, "the stash has no entry " + std::to_string(id.value), {}, {}};
    entry = std::move(found->second);
    entries_.erase(found);
  }
  for (const Ticket* copy : {&entry->in, &entry->out}) {
    if (!copy->valid()) continue;
    copy->cancel();
    // A device that refuses to order leaves the host to wait.
    if (!copy->done() && (!user || !copy->order_before(*user))) (void)copy->synchronize();
  }
  const std::lock_guard lock(mutex_);
  retired_.push_back(std::move(entry));
  reap();
  return {};
}

Stash::Counters Stash::counters() {
  const std::lock_guard lock(mutex_);
  collect_waits();
  Counters now = counters_;
  now.entries = entries_.size();
  return now;
}

void Stash::note_step(double seconds, Bytes held_peak) {
  const std::lock_guard lock(mutex_);
  collect_waits();
  metrics().add<Metric::kSteps>(1);
  metrics().add<Metric::kStepSeconds>(seconds);
  const PoolUsage in_ddr = ddr_->usage();
  for (int i = 0; i < kPoolCount; ++i) {
    metrics().set<Metric::kTierBytes>(TierId::kDdr, static_cast<Pool>(i),
                                      in_ddr.live_by_pool[static_cast<std::size_t>(i)]);
  }
  metrics().set<Metric::kTierBytes>(TierId::kHbm, Pool::kActivation, held_peak);
  metrics().set<Metric::kTierPeakBytes>(TierId::kDdr, in_ddr.mapped_peak);
}

}  // namespace terrace
