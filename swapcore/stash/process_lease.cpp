#include "swapcore/stash/process_lease.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/metrics.hpp"

namespace terrace {
namespace {

// How long a process that starts waits for room that others make: longer than they have to answer.
constexpr std::chrono::milliseconds kStartPatience{15000};
// Between two looks whether something was granted.
constexpr std::chrono::milliseconds kLook{5};

template <typename Function>
Function* found(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

PreloadWall PreloadWall::of_this_process() {
  return {found<std::uint64_t(int)>("terrace_wall_used"),
          found<void(int, std::uint64_t)>("terrace_wall_set_limit"),
          found<std::uint64_t(int)>("terrace_wall_overflow"),
          found<std::uint64_t(int)>("terrace_wall_refusals"),
          found<void(int, void*, Lend*, TakeBack*)>("terrace_wall_set_lender"),
          found<std::uint64_t(int)>("terrace_wall_return_unused")};
}

ProcessLease::ProcessLease(Device& device, Options options)
    : options_(std::move(options)),
      device_name_(device.info().pci.empty()
                       ? device.info().kind + ":" + std::to_string(device.info().id.index)
                       : device.info().pci),
      device_index_(device.info().id.index),
      capacity_(device.info().capacity),
      link_time_(device.link_time()) {}

Result<std::unique_ptr<ProcessLease>> ProcessLease::join(Device& device, Options options) {
  std::unique_ptr<ProcessLease> lease(new ProcessLease(device, std::move(options)));
  if (Status started = lease->start(); !started) return started.error();
  return lease;
}

ProcessLease::~ProcessLease() {
  link_.reset();
  if (page_) detach_metrics();
}

Status ProcessLease::start() {
  const Budgets& most = options_.budgets;
  DaemonLink::Options options = DaemonLink::options_from_environment();
  ddr_ = most.ddr.count();
  if (options_.daemon == Options::Daemon::kNone || options.socket.empty()) {
    set_hbm(most.hbm);
    return {};
  }
  if (options.job == "job") options.job = options_.job;
  // No page: the daemon shows nothing of this process, and training goes on.
  if (auto created = SharedPage::create(options.job)) {
    page_ = std::move(created).value();
    attach_metrics(page_->metrics());
    options.page_fd = page_->fd();
  }
  options.device = device_name_;
  options.capacity = capacity_;
  options.link_time = &link_time_;
  // What the wall has let through already is held from the first word on: for a moment the daemon counts it
  // twice, and never not at all.
  ddr_ = 0;
  options.holdings = [this] {
    DaemonLink::Holdings held{};
    const Bytes used = options_.wall.present() ? Bytes(options_.wall.used(device_index_)) : 0_B;
    held[static_cast<std::size_t>(TierId::kHbm)] = std::max(used, Bytes(hbm_.load()));
    held[static_cast<std::size_t>(TierId::kDdr)] = ddr() + Bytes(lent_.load());
    return held;
  };
  options.on_shrink = [this](const DaemonLink::Ask& ask) {
    const std::lock_guard lock(mutex_);
    asks_[ask.tier] = ask;
    asked_.store(true, std::memory_order_relaxed);
  };
  auto started = DaemonLink::start(std::move(options));
  if (!started) return started.error();
  link_ = std::move(started).value();
  // Its own lease goes back before more is asked for: the daemon counts it here already.
  if (options_.wall.present() && link_->connected())
    options_.wall.set_limit(device_index_, std::max(most.hbm, link_->lease(TierId::kHbm)).count());
  auto hbm = obtain(TierId::kHbm, most.hbm);
  if (!hbm) return hbm.error();
  const auto ddr = obtain(TierId::kDdr, most.ddr);
  ddr_ = ddr ? ddr->count() : 0;
  set_hbm(*hbm);
  metrics().set<Metric::kBudgetBytes>(TierId::kDdr, this->ddr());
  return {};
}

// What the daemon grants of `wanted` in all, now and while others make room; the rest stays asked for.
// Without a daemon the policy alone decides.
Result<Bytes> ProcessLease::obtain(TierId tier, Bytes wanted) {
  const auto deadline = steady_clock().now() + kStartPatience;
  const Bytes missing = saturating_sub(wanted, link_->lease(tier));
  if (missing == 0_B) return wanted;
  if (!link_->request_and_keep(tier, missing, kStartPatience)) return wanted;
  while (tier == TierId::kHbm && link_->lease(tier) == 0_B && link_->connected() &&
         steady_clock().now() < deadline)
    std::this_thread::sleep_for(kLook);
  if (link_->lease(tier) > 0_B) return std::min(link_->lease(tier), wanted);
  if (!link_->connected()) return wanted;  // it went away before it had granted anything
  return out_of_budget(wanted, Pool::kActivation,
                       std::string("the daemon has no ") + name_of(tier) + " left of its " +
                           format_bytes(link_->node_budget(tier)) +
                           ": other jobs hold it; `terrace status` lists them, a smaller [" + name_of(tier) +
                           "] budget in their policy leaves room");
}

void ProcessLease::set_hbm(Bytes bytes) {
  if (hbm_.exchange(bytes.count()) == bytes.count()) return;
  if (options_.wall.present()) options_.wall.set_limit(device_index_, bytes.count());
  metrics().set<Metric::kBudgetBytes>(TierId::kHbm, bytes);
}

ProcessLease::State ProcessLease::state() {
  State now;
  now.hbm = Bytes(hbm_.load(std::memory_order_relaxed));
  now.used = options_.wall.present() ? Bytes(options_.wall.used(device_index_)) : 0_B;
  if (options_.wall.overflow != nullptr) now.overflow = Bytes(options_.wall.overflow(device_index_));
  if (options_.wall.refusals != nullptr) now.refusals = options_.wall.refusals(device_index_);
  now.target = now.hbm;
  if (link_ == nullptr) return now;
  now.switched_off = link_->passthrough();
  const bool asked = asked_.load(std::memory_order_relaxed);
  const bool more = leased(TierId::kHbm) > now.hbm || leased(TierId::kDdr) > ddr() + Bytes(lent_.load());
  if (!asked && !more) return now;
  if (asked) (void)reclaim_ddr();
  const std::lock_guard lock(mutex_);
  // Less is never taken: it is given, by give_way().
  if (const Bytes granted = leased(TierId::kHbm); granted > Bytes(hbm_.load())) set_hbm(granted);
  now.hbm = now.target = Bytes(hbm_.load());
  if (const auto ask = asks_.find(TierId::kHbm); ask != asks_.end())
    now.target = std::min(now.hbm, ask->second.target);
  follow_ddr();
  return now;
}

void ProcessLease::give_way(Bytes used, Bytes needed) {
  if (link_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto asked = asks_.find(TierId::kHbm);
  if (asked == asks_.end()) return;
  const DaemonLink::Ask ask = asked->second;
  forget(asked);
  const Bytes before(hbm_.load());
  Bytes left = std::max({ask.target, used, needed});
  if (options_.wall.present()) {
    // The wall first, then what it counts: what was charged in between is seen.
    options_.wall.set_limit(device_index_, std::min(left, before).count());
    left = std::max(left, Bytes(options_.wall.used(device_index_)));
  }
  left = std::min(left, before);
  if (options_.wall.present()) options_.wall.set_limit(device_index_, left.count());
  set_hbm(left);
  link_->answer(ask, saturating_sub(link_->lease(TierId::kHbm), left));
}

// The wall calls the lender with locks of its own: it is told without ours.
void ProcessLease::attach(DdrPool* pool) {
  const bool lends = options_.wall.set_lender != nullptr;
  if (lends && pool == nullptr) options_.wall.set_lender(device_index_, nullptr, nullptr, nullptr);
  {
    const std::lock_guard lock(mutex_);
    pool_ = pool;
  }
  if (!lends || pool == nullptr) return;
  options_.wall.set_lender(
      device_index_, this,
      [](void* lender, std::uint64_t bytes) {
        return static_cast<ProcessLease*>(lender)->lend(Bytes(bytes)).count();
      },
      [](void* lender, std::uint64_t bytes) { static_cast<ProcessLease*>(lender)->take_back(Bytes(bytes)); });
}

Bytes ProcessLease::lend(Bytes wanted) {
  const std::lock_guard lock(mutex_);
  const Bytes whole = ddr();
  wanted = std::min(wanted, whole);
  if (pool_ == nullptr || wanted == 0_B) return {};
  // What the pool holds in use it keeps.
  const Bytes lent = saturating_sub(wanted, pool_->set_budget(whole - wanted));
  if (lent < wanted) (void)pool_->set_budget(whole - lent);
  ddr_ = (whole - lent).count();
  lent_ += lent.count();
  return lent;
}

void ProcessLease::take_back(Bytes bytes) {
  const std::lock_guard lock(mutex_);
  const Bytes back = std::min(bytes, Bytes(lent_.load()));
  lent_ -= back.count();
  ddr_ = (ddr() + back).count();
  if (pool_ != nullptr) (void)pool_->set_budget(ddr());
}

bool ProcessLease::reclaim_ddr() {
  return options_.wall.return_unused != nullptr && options_.wall.return_unused(device_index_) > 0;
}

Bytes ProcessLease::leased(TierId tier) const {
  const Bytes most = tier == TierId::kHbm ? options_.budgets.hbm : options_.budgets.ddr;
  return std::min(link_->lease(tier), most);
}

void ProcessLease::forget(std::map<TierId, DaemonLink::Ask>::iterator ask) {
  asks_.erase(ask);
  asked_.store(!asks_.empty(), std::memory_order_relaxed);
}

// The lock is held. Pinned memory follows by itself: what is free of it can be given back at once.
void ProcessLease::follow_ddr() {
  if (pool_ == nullptr) return;
  const Bytes lent(lent_.load());
  Bytes budget = std::max(leased(TierId::kDdr), ddr() + lent);
  if (const auto asked = asks_.find(TierId::kDdr); asked != asks_.end()) {
    const Bytes target = std::max(std::min(asked->second.target, budget), lent);
    budget = std::min(target + pool_->set_budget(target - lent), budget);
    link_->answer(asked->second, saturating_sub(link_->lease(TierId::kDdr), budget));
    forget(asked);
  }
  (void)pool_->set_budget(budget - lent);
  ddr_ = (budget - lent).count();
  metrics().set<Metric::kBudgetBytes>(TierId::kDdr, budget);
}

}  // namespace terrace
