// What lives in DDR for good: its host memory, the rings it passes through, the waits it causes.
#include <utility>

#include "runtime/metrics.hpp"
#include "swapcore/session.hpp"
#include "swapcore/session_impl.hpp"

namespace terrace {

Result<BlockRef> Session::allocate_host(Bytes size, Pool pool) {
  auto block = impl_->ddr->allocate(size, pool);
  if (!block) {
    Error error = std::move(block).error();
    if (error.code == Errc::kOutOfBudget) {
      error.text = "out of DDR for " + format_bytes(size) + " (" + name_of(pool) + "): " + error.text +
                   "; what would help in the policy: [ddr] budget = a larger size, or [nvme] budget";
    }
    return error;
  }
  return BlockRef(new Block(*block), [ddr = impl_->ddr.get()](const Block* held) {
    (void)ddr->free(*held);
    delete held;
  });
}

Result<std::unique_ptr<SlotRing>> Session::open_ring(const RingOptions& options) {
  std::vector<BlockRef> slots;
  for (int i = 0; i < options.slots; ++i) {
    auto slot = allocate(options.slot, options.pool);
    if (!slot) return std::move(slot).error();
    slots.push_back(std::move(slot).value());
  }
  return SlotRing::create({.device = impl_->device,
                           .copies = *impl_->copies,
                           .allocated_on = impl_->compute,
                           .user = options.user,
                           .reason = options.reason,
                           .cold = options.cold},
                          std::move(slots));
}

Status Session::wait_for(Event event, StallReason reason) {
  return wait_for([&] { return impl_->device.wait(impl_->compute, event); }, reason);
}

Status Session::wait_for(const std::function<Status()>& wait, StallReason reason) {
  auto& probes = impl_->waits[reason];
  if (probes == nullptr) probes = std::make_unique<WaitProbes>(impl_->device);
  return probes->around(impl_->compute, wait);
}

void Session::Impl::count_stall(StallReason reason, double seconds) {
  if (seconds <= 0) return;
  counters.stall_seconds += seconds;
  if (reason == StallReason::kExpertLate) counters.expert_stall_seconds += seconds;
  if (reason == StallReason::kRouterWord) counters.router_stall_seconds += seconds;
  if (reason == StallReason::kOptimizerLate) counters.optimizer_stall_seconds += seconds;
  metrics().add<Metric::kStallSeconds>(reason, seconds);
}

void Session::count_stall(StallReason reason, double seconds) { impl_->count_stall(reason, seconds); }

}  // namespace terrace
