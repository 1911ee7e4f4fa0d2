// The session's side of the node: a page of metrics for the daemon, and budgets cut to what it grants.
#include <algorithm>
#include <utility>

#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {
namespace {

// What the daemon grants of `wanted`. Without one the policy alone decides.
Result<Bytes> lease(DaemonLink& link, TierId tier, Bytes wanted) {
  auto granted = link.request(tier, wanted);
  if (!granted) return wanted;
  if (*granted > 0_B || wanted == 0_B) return *granted;
  return out_of_budget(wanted, Pool::kScratch,
                       std::string("the daemon has no ") + name_of(tier) + " left of its " +
                           format_bytes(link.node_budget(tier)) +
                           ": other jobs hold it; `terrace status` lists them, a "
                           "smaller [" +
                           name_of(tier) + "] budget in their policy leaves room");
}

}  // namespace

Status Session::Impl::join_daemon() {
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
  options.holdings = [this] {
    DaemonLink::Holdings held{};
    held[static_cast<std::size_t>(TierId::kHbm)] = Bytes(hbm_claim.load(std::memory_order_relaxed));
    held[static_cast<std::size_t>(TierId::kDdr)] = Bytes(ddr_claim.load(std::memory_order_relaxed));
    return held;
  };
  auto started = DaemonLink::start(std::move(options));
  if (!started) return started.error();
  link = std::move(started).value();
  auto hbm_lease = lease(*link, TierId::kHbm, budgets.hbm);
  if (!hbm_lease) return hbm_lease.error();
  // Without DDR a job still trains, by computing again.
  const auto ddr_lease = lease(*link, TierId::kDdr, budgets.ddr);
  budgets.hbm = *hbm_lease;
  budgets.ddr = ddr_lease ? *ddr_lease : 0_B;
  budgets.swapcore_hbm = std::min(budgets.swapcore_hbm, budgets.hbm);
  budgets.swapcore_ddr = std::min(budgets.swapcore_ddr, budgets.ddr);
  budgets.checkpoint = std::min(budgets.checkpoint, budgets.hbm);
  hbm_claim = budgets.hbm.count();
  ddr_claim = budgets.ddr.count();
  return {};
}

void Session::Impl::leave_daemon() {
  link.reset();
  if (page) detach_metrics();
  page.reset();
}

}  // namespace terrace
