#include "hooks/intercept/recorder.hpp"

#include <pthread.h>

#include <cerrno>

#include "hooks/intercept/wall.hpp"
#include "runtime/errno_kept.hpp"
#include "runtime/trace/recorder.hpp"

namespace terrace::hooks {
namespace {

constinit Recorder the_recorder;

// Who an allocation serves isn't known at this boundary.
constexpr Pool kUnknownPurpose = Pool::kScratch;

// The trace tells blocks apart by address; handles of physical memory are no addresses, and never equal one.
const void* address_in_trace(AllocationKey key) { return reinterpret_cast<const void*>(key); }

// Before any call: who records in this library sees the calls of a driver's users.
[[gnu::constructor]] void describe_recording() {
  trace::describe_recording(trace::Layer::kDriverCalls, "cuda");
}

}  // namespace

Recorder& recorder() noexcept { return the_recorder; }

void Recorder::calling(CallGroup group) noexcept {
  if (!forks_watched_.load(std::memory_order_acquire) &&
      !forks_watched_.exchange(true, std::memory_order_acq_rel)) {
    const ErrnoKept kept;
    pthread_atfork(nullptr, nullptr, [] { start_again_in_child(); });
  }
  metrics().add<Metric::kPassthroughCalls>(group, 1);
}

void Recorder::start_again_in_child() noexcept {
  the_recorder.table_.clear_in_child();
  for (auto& live : the_recorder.live_bytes_) live.store(0, std::memory_order_relaxed);
  wall().start_again_in_child();
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
  if (put.replaced) {
    fall(*put.replaced);
    freed(*put.replaced);
  }
  if (put.kept) {
    rise(allocation);
  } else {
    freed(allocation);  // its free will not know
  }
}

void Recorder::allocated(AllocationKey key, const Allocation& allocation, std::uint64_t stream) noexcept {
  const ErrnoKept kept;
  metrics().add<Metric::kAllocations>(allocation.tier, kUnknownPurpose, 1);
  metrics().add<Metric::kAllocatedBytes>(allocation.tier, kUnknownPurpose, allocation.size);
  keep(key, allocation, stream);
}

void Recorder::created_physical(AllocationKey key, const Allocation& allocation) noexcept {
  const ErrnoKept kept;
  metrics().add<Metric::kAllocations>(allocation.tier, kUnknownPurpose, 1);
  metrics().add<Metric::kAllocatedBytes>(allocation.tier, kUnknownPurpose, allocation.size);
  if (allocation.tier == TierId::kHbm)
    trace::record_allocate(address_in_trace(key), allocation.size, 0, trace::kUnknown);
  rise(allocation);
}

void Recorder::releasing_physical(AllocationKey key) noexcept {
  const ErrnoKept kept;
  trace::record_free(address_in_trace(key), 0);
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

void Recorder::freed(const Allocation& allocation) noexcept {
  if (allocation.charged > 0_B) wall().refund(allocation.device, allocation.charged);
}

void Recorder::forget_device(int device) noexcept {
  table_.take_all_of(device, [this](const Allocation& allocation) {
    fall(allocation);
    freed(allocation);
  });
}

void Recorder::freed_unknown() noexcept { metrics().add<Metric::kUnknownFrees>(1); }

}  // namespace terrace::hooks
