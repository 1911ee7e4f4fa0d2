#include "hooks/intercept/recorder.hpp"

#include <pthread.h>

#include <cerrno>
#include <chrono>

#include "runtime/daemon_link.hpp"
#include "runtime/shared_page.hpp"
#include "runtime/trace/recorder.hpp"

namespace terrace::hooks {
namespace {

constinit Recorder the_recorder;

// Who an allocation serves isn't known at this boundary.
constexpr Pool kUnknownPurpose = Pool::kScratch;

// A guest waits no longer for a daemon that doesn't answer.
constexpr std::chrono::milliseconds kPatience{2000};

class ErrnoKept {
 public:
  ErrnoKept() noexcept : kept_(errno) {}
  ~ErrnoKept() { errno = kept_; }
  ErrnoKept(const ErrnoKept&) = delete;
  ErrnoKept& operator=(const ErrnoKept&) = delete;

 private:
  int kept_;
};

// The trace tells blocks apart by address; handles of physical memory are no addresses, and never equal one.
const void* address_in_trace(AllocationKey key) { return reinterpret_cast<const void*>(key); }

// Before any call: who records in this library sees the calls of a driver's users.
[[gnu::constructor]] void describe_recording() {
  trace::describe_recording(trace::Layer::kDriverCalls, "cuda");
}

}  // namespace

Recorder& recorder() noexcept { return the_recorder; }

void Recorder::calling(CallGroup group) noexcept {
  if (!begun_.load(std::memory_order_acquire) && !begun_.exchange(true, std::memory_order_acq_rel)) {
    const ErrnoKept kept;
    if (!forks_watched_.exchange(true, std::memory_order_relaxed))
      pthread_atfork(nullptr, nullptr, [] { start_again_in_child(); });
    join_daemon();
  }
  metrics().add<Metric::kPassthroughCalls>(group, 1);
}

void Recorder::join_daemon() noexcept {
  try {
    DaemonLink::Options options = DaemonLink::options_from_environment();
    if (options.socket.empty()) return;
    auto page = SharedPage::create(options.job);
    if (!page) return;  // counting goes on in the private page
    options.page_fd = (*page)->fd();
    options.patience = kPatience;
    auto link = DaemonLink::start(std::move(options));
    if (!link) return;
    attach_metrics((*page)->metrics());
    // Both last until the process ends, and longer than anything that a destructor here could outlive.
    (void)page->release();
    (void)link->release();
  } catch (...) {  // out of memory: the guest's call goes on
  }
}

void Recorder::start_again_in_child() noexcept {
  the_recorder.table_.clear_in_child();
  for (auto& live : the_recorder.live_bytes_) live.store(0, std::memory_order_relaxed);
  the_recorder.begun_.store(false, std::memory_order_release);
}

void Recorder::rise(const Allocation& allocation) noexcept {
  auto& live = live_bytes_[static_cast<std::size_t>(allocation.tier)];
  const std::uint64_t size = allocation.size.count();
  const std::uint64_t now = live.fetch_add(size, std::memory_order_relaxed) + size;
  metrics().add<Metric::kTierBytes>(allocation.tier, kUnknownPurpose, allocation.size);
  metrics().raise<Metric::kTierPeakBytes>(allocation.tier, Bytes(now));
}

void Recorder::fall(const Allocation& allocation) noexcept {
  live_bytes_[static_cast<std::size_t>(allocation.tier)].fetch_sub(allocation.size.count(),
                                                                   std::memory_order_relaxed);
  metrics().subtract<Metric::kTierBytes>(allocation.tier, kUnknownPurpose, allocation.size);
}

void Recorder::keep(AllocationKey key, const Allocation& allocation, std::uint64_t stream) noexcept {
  if (allocation.tier == TierId::kHbm) {
    trace::record_allocate(address_in_trace(key), allocation.size, stream, trace::kUnknown);
  }
  const AllocationTable::Put put = table_.put(key, allocation);
  if (put.replaced) fall(*put.replaced);
  if (put.kept) rise(allocation);
}

void Recorder::allocated(AllocationKey key, const Allocation& allocation, std::uint64_t stream) noexcept {
  const ErrnoKept kept;
  metrics().add<Metric::kAllocations>(allocation.tier, kUnknownPurpose, 1);
  metrics().add<Metric::kAllocatedBytes>(allocation.tier, kUnknownPurpose, allocation.size);
  keep(key, allocation, stream);
}

std::optional<Allocation> Recorder::freeing(AllocationKey key, std::uint64_t stream) noexcept {
  const ErrnoKept kept;
  trace::record_free(address_in_trace(key), stream);
  const auto taken = table_.take(key);
  if (taken) fall(*taken);
  return taken;
}

void Recorder::not_freed(AllocationKey key, const Allocation& allocation, std::uint64_t stream) noexcept {
  const ErrnoKept kept;
  keep(key, allocation, stream);
}

void Recorder::freed_unknown() noexcept { metrics().add<Metric::kUnknownFrees>(1); }

}  // namespace terrace::hooks
