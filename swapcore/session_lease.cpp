// The session's side of the node: a page of metrics for the daemon, and budgets cut to what it grants.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "runtime/clock.hpp"
#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {
namespace {

// How long a process that starts waits for room that others make: longer than they have to answer.
constexpr std::chrono::milliseconds kStartPatience{15000};
// What the pool rounds up to and can't use: of what a step is known to need, a part this large.
constexpr std::uint64_t kSlack = 16;
// What is asked for at a time where the trainer finds no room.
constexpr Bytes kGrowth = 16_MiB;

// Between two looks whether something was granted.
constexpr std::chrono::milliseconds kLook{5};

// What the daemon grants of `wanted`, now and while others make room: not nothing, where it comes in time.
// Without a daemon the policy alone decides.
Result<Bytes> lease(DaemonLink& link, TierId tier, Bytes wanted) {
  const auto deadline = steady_clock().now() + kStartPatience;
  const auto granted = link.request_and_keep(tier, wanted, kStartPatience);
  if (!granted) return wanted;
  while (tier == TierId::kHbm && link.lease(tier) == 0_B && wanted > 0_B && link.connected() &&
         steady_clock().now() < deadline)
    std::this_thread::sleep_for(kLook);
  if (link.lease(tier) > 0_B || wanted == 0_B) return link.lease(tier);
  if (!link.connected()) return wanted;  // it went away before it had granted anything
  return out_of_budget(wanted, Pool::kScratch,
                       std::string("the daemon has no ") + name_of(tier) + " left of its " +
                           format_bytes(link.node_budget(tier)) +
                           ": other jobs hold it; `terrace status` lists them, a "
                           "smaller [" +
                           name_of(tier) + "] budget in their policy leaves room");
}

// A preload library in front of this process would charge the same bytes to a lease of its own.
void tell_the_hook() {
  using StandAside = void (*)();
  if (const auto stand_aside = reinterpret_cast<StandAside>(dlsym(RTLD_DEFAULT, "terrace_stand_aside")))
    stand_aside();
}

}  // namespace

Status Session::Impl::join_daemon() {
  tell_the_hook();
  DaemonLink::Options options = DaemonLink::options_from_environment();
  if (options.socket.empty()) return {};
  if (options.job == "job") options.job = job;
  // No page: the daemon shows nothing of this process, and training goes on.
  if (auto created = SharedPage::create(options.job)) {
    page = std::move(created).value();
    attach_metrics(page->metrics());
    options.page_fd = page->fd();
  }
  options.device = device.info().pci.empty() ? device.info().kind + ":0" : device.info().pci;
  options.capacity = device.info().capacity;
  options.link_time = &device.link_time();
  if (numa_nodes.size() == 1) options.numa_node = numa_nodes.front();
  options.holdings = [this] {
    DaemonLink::Holdings held{};
    held[static_cast<std::size_t>(TierId::kHbm)] = Bytes(hbm_claim.load(std::memory_order_relaxed));
    held[static_cast<std::size_t>(TierId::kDdr)] = Bytes(ddr_claim.load(std::memory_order_relaxed));
    return held;
  };
  options.on_shrink = [this](const DaemonLink::Ask& ask) {
    const std::lock_guard lock(asks_mutex);
    asks[ask.tier] = ask;
    asked.store(true, std::memory_order_relaxed);
  };
  auto started = DaemonLink::start(std::move(options));
  if (!started) return started.error();
  link = std::move(started).value();
  auto hbm_lease = lease(*link, TierId::kHbm, budgets.hbm);
  if (!hbm_lease) return hbm_lease.error();
  // Without DDR a job still trains, by computing again.
  const auto ddr_lease = lease(*link, TierId::kDdr, budgets.ddr);
  set_hbm_budget(*hbm_lease);
  set_ddr_budget(ddr_lease ? *ddr_lease : 0_B);
  return {};
}

void Session::Impl::set_hbm_budget(Bytes budget) {
  budgets.hbm = budget;
  budgets.swapcore_hbm = std::min(policy_budgets.swapcore_hbm, budget);
  budgets.checkpoint = std::min(policy_budgets.checkpoint, budget);
  hbm_claim = budget.count();
  metrics().set<Metric::kBudgetBytes>(TierId::kHbm, budget);
}

void Session::Impl::set_ddr_budget(Bytes budget) {
  budgets.ddr = budget;
  budgets.swapcore_ddr = std::min(policy_budgets.swapcore_ddr, budget);
  ddr_claim = budget.count();
  metrics().set<Metric::kBudgetBytes>(TierId::kDdr, budget);
}

// Before a step: what the daemon has granted meanwhile, what it wants back, whether Terrace is switched off.
void Session::Impl::follow_daemon() {
  if (!link) return;
  if (link->passthrough() != switched_off) {
    switched_off = !switched_off;
    plan.reset();
    next_plan = {};
    profile.reset();
    measured.reset();
    schedule.forget();
  }
  if (asked.load(std::memory_order_relaxed)) give_way();
  const Bytes hbm_lease = std::min(link->lease(TierId::kHbm), policy_budgets.hbm);
  const Bytes ddr_lease = std::min(link->lease(TierId::kDdr), policy_budgets.ddr);
  if (hbm_lease > budgets.hbm) {
    (void)hbm->set_budget(hbm_lease);
    set_hbm_budget(hbm_lease);
  }
  if (ddr_lease > budgets.ddr) {
    (void)ddr->set_budget(ddr_lease);
    set_ddr_budget(ddr_lease);
  }
  const bool changed = budgets.hbm != planned_for.hbm || budgets.ddr != planned_for.ddr;
  planned_for = budgets;
  if (changed && measured && !profile) {
    limit_outputs();
    make_plan();
  }
}

// What can be given back at once is: free memory, cached outputs, saved activations that may wait in DDR. A
// step goes on with less: what it finds no room for is computed again.
void Session::Impl::give_way() {
  std::map<TierId, DaemonLink::Ask> open;
  {
    const std::lock_guard lock(asks_mutex);
    open.swap(asks);
    asked.store(false, std::memory_order_relaxed);
  }
  for (const auto& [tier, ask] : open) {
    const Bytes leased = link->lease(tier);
    Bytes left = leased;
    if (tier == TierId::kHbm) left = shrink_hbm(ask.target);
    if (tier == TierId::kDdr) left = shrink_ddr(ask.target);
    link->answer(ask, saturating_sub(leased, left));
  }
}

// What a step needs is known when one has been measured: until then, everything.
Bytes Session::Impl::shrink_hbm(Bytes wanted) {
  if (hbm_needed == 0_B) return std::max(budgets.hbm, link->lease(TierId::kHbm));
  const Bytes target = std::max(wanted, hbm_needed + hbm_needed / kSlack);
  if (target >= budgets.hbm) return target;
  Bytes over = hbm->set_budget(target);
  while (over > 0_B && free_something()) over = hbm->set_budget(target);
  const Bytes left = std::min(target + over, budgets.hbm);
  (void)hbm->set_budget(left);
  set_hbm_budget(left);
  return left;
}

Bytes Session::Impl::shrink_ddr(Bytes wanted) {
  if (hbm_needed == 0_B) return std::max(budgets.ddr, link->lease(TierId::kDdr));
  const Bytes target = std::max(wanted, ddr_needed + ddr_needed / kSlack);
  if (target >= budgets.ddr) return target;
  const Bytes left = std::min(target + ddr->set_budget(target), budgets.ddr);
  (void)ddr->set_budget(left);
  set_ddr_budget(left);
  return left;
}

// Where the trainer finds no room and the policy allows it more than it was granted: what the node has left,
// or what others who hold too much give back in time.
bool Session::Impl::grow(Bytes missing) {
  if (!link || !link->connected() || budgets.hbm >= policy_budgets.hbm) return false;
  const auto began = steady_clock().now();
  const Bytes most = policy_budgets.hbm - budgets.hbm;
  const Bytes before = budgets.hbm;
  if (link->lease(TierId::kHbm) <= before) {
    (void)link->request(TierId::kHbm, std::min(std::max(missing + missing / kSlack, kGrowth), most));
  }
  if (link->lease(TierId::kHbm) <= before) (void)link->request_and_keep(TierId::kHbm, most, {});
  // Who has all there is waits for nobody.
  const bool others = link->lease(TierId::kHbm) < link->node_budget(TierId::kHbm);
  while (others && !waited_in_vain && link->lease(TierId::kHbm) <= budgets.hbm && link->connected() &&
         steady_clock().now() < began + kStartPatience) {
    give_way();  // who waits for others lets nobody wait
    std::this_thread::sleep_for(kLook);
  }
  count_stall(StallReason::kBudget, seconds_of(steady_clock().now() - began));
  const Bytes budget = std::min(link->lease(TierId::kHbm), policy_budgets.hbm);
  waited_in_vain = budget <= budgets.hbm;
  if (waited_in_vain) return false;
  (void)hbm->set_budget(budget);
  set_hbm_budget(budget);
  return true;
}

void Session::Impl::leave_daemon() {
  link.reset();
  if (page) detach_metrics();
  page.reset();
}

}  // namespace terrace
