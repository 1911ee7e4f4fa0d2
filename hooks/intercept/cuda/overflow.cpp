#include "hooks/intercept/cuda/overflow.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "hooks/intercept/cuda/forks.hpp"
#include "hooks/intercept/cuda/physical_ledger.hpp"
#include "hooks/intercept/cuda/stable_blocks.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"
#include "hooks/intercept/hook_settings.hpp"
#include "hooks/intercept/loaded_library.hpp"
#include "hooks/intercept/notice.hpp"
#include "hooks/intercept/recorder.hpp"
#include "hooks/intercept/wall.hpp"
#include "runtime/errno_kept.hpp"

namespace terrace::hooks::cuda {
namespace {

// Calls come while static objects go: no destructor runs.
union NeverDestroyed {
  constexpr NeverDestroyed() : overflow() {}
  ~NeverDestroyed() {}
  Overflow overflow;
};
constinit NeverDestroyed the;

// What this thread was refused last, and has not got since.
struct Refused {
  Overflow::Form form = Overflow::Form::kPlain;
  DeviceOrdinal device = -1;
  std::uint64_t size = 0;
  bool operator==(const Refused&) const = default;
};
thread_local constinit Refused last_refused;

constexpr Bytes kLeaseStep = 256_MiB;  // a lease of DDR grows by at least so much

bool wanted_here() {
  const HookSettings& settings = hook_settings();
  return settings.spill != SpillWord::kOff && settings.ddr_budget > 0_B && is_loaded("libc10_cuda.so");
}

// Libraries that fail for good where their workspace is refused, at the first use on a thread, say.
bool asks_once(const void* caller) {
  static constexpr const char* kLibraries[] = {"libcublas.so",
                                               "libcublasLt.so",
                                               "libcudnn.so",
                                               "libcudnn_graph.so",
                                               "libcudnn_engines_precompiled.so",
                                               "libcusolver.so",
                                               "libcusparse.so",
                                               "libcufft.so"};
  return std::any_of(std::begin(kLibraries), std::end(kLibraries),
                     [caller](const char* library) { return is_in_library(caller, library); });
}

Address address_of(DevicePointer pointer) { return reinterpret_cast<Address>(pointer); }

}  // namespace

Overflow& overflow() noexcept { return the.overflow; }

void Overflow::satisfied() noexcept { last_refused = {}; }

// ---------------------------------------------------------------- whether, and on which device

// The second time; a plain first one is remembered. At once for who does not ask again.
bool Overflow::is_due(const Request& request, DeviceOrdinal device) noexcept {
  const Refused now{request.form, device, request.size.count()};
  const bool again = last_refused == now;
  last_refused = now;
  return again || request.form == Form::kOrdered || asks_once(request.caller);
}

// Null: not to be served.
Overflow::OfDevice* Overflow::ready(const Request& request) {
  const DeviceOrdinal device = current_device();
  if (device < 0 || device >= kMostDevices || !wanted_here()) return nullptr;
  if (wall().switched_off(device) || wall().stands_aside()) return nullptr;
  if (!is_due(request, device) || request.size == 0_B || request.size > hook_settings().ddr_budget)
    return nullptr;
  if (stream_pools().capturing() || allocates_for_others(request.caller)) return nullptr;
  ContextHandle context = nullptr;
  const DriverCalls& driver = *driver_calls();
  if (driver.context_get(&context) != kSuccess || context == nullptr) return nullptr;
  end_deferred();
  OfDevice* const on = open(context, device);
  return on == nullptr || on->context != context || on->closed.load() ? nullptr : on;
}

Overflow::OfDevice* Overflow::open(ContextHandle context, DeviceOrdinal ordinal) {
  watch_forks();
  const auto index = static_cast<std::size_t>(ordinal);
  const auto known = [&] { return opened_[index] != nullptr || failed_[index]; };
  std::unique_lock lock(mutex_);
  if (!known()) {  // the first lease is the smallest, and none where others have all
    lock.unlock();
    (void)others_gave_back(ordinal);
    lock.lock();
  }
  if (known()) return opened_[index];
  std::unique_ptr<OfDevice> made = make(context, ordinal);
  if (made == nullptr) return nullptr;
  // Whoever becomes one from now on waits for the lock, and finds the device.
  const std::uint64_t peers = stable_blocks().peers_of(ordinal);
  for (DeviceOrdinal other = 0; other < kMostDevices; ++other) {
    if ((peers >> other & 1) != 0) (void)made->device->grant(other);
  }
  if (std::none_of(opened_.begin(), opened_.end(), [](const OfDevice* on) { return on != nullptr; }))
    (void)std::atexit([] { overflow().process_ends(); });
  return opened_[index] = made.release();
}

std::unique_ptr<Overflow::OfDevice> Overflow::make(ContextHandle context, DeviceOrdinal ordinal) {
  auto made = std::make_unique<OfDevice>();
  made->context = context;
  made->ordinal = ordinal;
  made->lease = std::make_shared<HostLease>(0_B);
  const auto refused = [&](const Error& error) {
    // Asked again, a lease may have room, and a device memory; what they don't have they won't get.
    failed_[static_cast<std::size_t>(ordinal)] = error.code == Errc::kNotSupported;
    say_once(Notice::kNoSpill, "device " + std::to_string(ordinal) +
                                   ": what HBM has no room for cannot lie in DDR (" + error.text + ")");
    wall().return_ddr(ordinal, made->lease->budget());
    return nullptr;
  };
  auto device = GuestDevice::open(*driver_calls(), {context, ordinal});
  if (!device) return refused(device.error());
  made->device = *std::move(device);
  const Bytes granularity = made->device->info().granularity;
  made->lease->set_budget(wall().lease_ddr(ordinal, std::min(granularity, hook_settings().ddr_budget)));
  auto handles = HostHandlePool::create(
      *made->device, {.lease = made->lease, .nodes = {made->device->nearest_node()}, .chunk = granularity});
  if (!handles) return refused(handles.error());
  made->handles = *std::move(handles);
  return made;
}

// ---------------------------------------------------------------- the lease

// Freed, and charged to the lease.
Bytes Overflow::kept_by(OfDevice& on) {
  const HostHandlePool::Usage usage = on.handles->usage();
  const std::lock_guard lock(on.kept_mutex);
  return usage.held - usage.live + on.kept_bytes;
}

// True: the lease has room for `size`, freed handles of other sizes given up. lease_mutex held, until it is
// taken.
bool Overflow::lease_more(OfDevice& on, Bytes size) {
  const Bytes most = hook_settings().ddr_budget, now = on.lease->budget();
  const Bytes needed = saturating_sub(on.lease->held(), kept_by(on)) + size;
  if (needed <= now) return true;
  Bytes more;
  if (needed <= most)
    more = wall().lease_ddr(on.ordinal, std::min(std::max(needed - now, kLeaseStep), most - now));
  if (now + more >= needed) {
    on.lease->set_budget(now + more);
    return true;
  }
  wall().return_ddr(on.ordinal, more);
  return false;
}

// What the other devices' part of the DDR has unused; true: something.
bool Overflow::others_gave_back(DeviceOrdinal device) {
  Bytes back;
  for (DeviceOrdinal other = 0; other < kMostDevices; ++other) {
    if (other != device) back += return_unused(other);
  }
  return back > 0_B;
}

// False.
bool Overflow::refused_by_ddr(const OfDevice& on) {
  say_once(Notice::kDdrFull, "HBM and DDR are full: " + format_bytes(on.lease->held()) +
                                 " of DDR hold what HBM has no room for, and there is no more to lease; a "
                                 "larger ddr.budget makes room");
  return false;
}

// Down to what is in use, and `keep` of what is not.
Bytes Overflow::shrink_lease(OfDevice& on, Bytes keep) {
  // Nothing is taken meanwhile; what is given back makes less of what is in use.
  const std::lock_guard lock(on.lease_mutex);
  const Bytes before = on.lease->budget(), kept = kept_by(on);
  const Bytes after = std::min(before, saturating_sub(on.lease->held(), kept) + std::min(kept, keep));
  if (after == before) return {};
  on.lease->set_budget(after);
  drop_handles(on, on.lease->excess());
  (void)on.handles->trim(HostHandlePool::Until::kBudgetIsKept);
  wall().return_ddr(on.ordinal, before - after);
  return before - after;
}

Bytes Overflow::return_unused(DeviceOrdinal device) noexcept try {
  if (device < 0 || device >= kMostDevices) return {};
  OfDevice* on = nullptr;
  {
    const std::lock_guard lock(mutex_);
    on = opened_[static_cast<std::size_t>(device)];
  }
  const ErrnoKept kept;
  end_deferred();
  return on == nullptr || on->closed.load() ? Bytes() : shrink_lease(*on, 0_B);
} catch (...) {
  return {};
}

// ---------------------------------------------------------------- a range of its own

bool Overflow::take_handles(OfDevice& on, Block& block) {
  for (Bytes done; done < block.size;) {
    auto handle = on.handles->take(std::min(kChunk, block.size - done));
    if (!handle) {
      give_back(on, block.handles);
      return false;
    }
    done += handle->size;
    block.handles.push_back(*handle);
  }
  return true;
}

void Overflow::give_back(OfDevice& on, const std::vector<HostHandlePool::Handle>& handles) {
  for (const HostHandlePool::Handle& handle : handles) (void)on.handles->give_back(handle);
}

std::optional<DevicePointer> Overflow::map(OfDevice& on, const Block& block) {
  const DriverCalls& driver = *driver_calls();
  std::vector<PhysicalPiece> pieces;
  for (const HostHandlePool::Handle& handle : block.handles) pieces.push_back({handle.physical, handle.size});
  DevicePointer at = 0;
  if (on.device->in_context([&] { return driver.reserve(&at, block.size.count(), 0, 0, 0); }) != kSuccess) {
    give_back(on, block.handles);
    return std::nullopt;
  }
  const Status mapped = on.device->map_all(address_of(at), pieces);
  if (mapped) return at;
  if (mapped.error().code == Errc::kDeviceLost) {  // some of it stays mapped: neither can be used again
    on.closed.store(true);
    return std::nullopt;
  }
  (void)on.device->in_context([&] { return driver.release_range(at, block.size.count()); });
  give_back(on, block.handles);
  return std::nullopt;
}

void Overflow::served(OfDevice& on, Bytes size) {
  Counts& counts = counts_[static_cast<std::size_t>(on.ordinal)];
  counts.times.fetch_add(1, std::memory_order_relaxed);
  const std::uint64_t now = counts.alive.fetch_add(size.count()) + size.count();
  std::uint64_t peak = counts.peak.load(std::memory_order_relaxed);
  while (now > peak && !counts.peak.compare_exchange_weak(peak, now)) {
  }
}

bool Overflow::allocate(const Request& request, DevicePointer* out) noexcept try {
  const ErrnoKept kept;
  OfDevice* const on = ready(request);
  if (on == nullptr) return false;
  Block block{on, round_up(request.size, on->handles->chunk())};
  const auto take = [&] {
    const std::lock_guard lock(on->lease_mutex);
    if (!lease_more(*on, block.size)) return false;
    if (on->lease->room() < block.size) drop_handles(*on, block.size);
    return take_handles(*on, block);
  };
  if (!take() && (!others_gave_back(on->ordinal) || !take())) return refused_by_ddr(*on);
  const auto at = map(*on, block);
  if (!at) return false;
  const Bytes size = block.size;
  block.at = *at;
  put(std::move(block));
  metrics().add<Metric::kAllocations>(TierId::kDdr, Pool::kScratch, 1);
  metrics().add<Metric::kAllocatedBytes>(TierId::kDdr, Pool::kScratch, size);
  served(*on, size);
  satisfied();
  *out = *at;
  return true;
} catch (...) {  // no memory for our own notes
  return false;
}

// ---------------------------------------------------------------- free

void Overflow::put(Block block) {
  const std::lock_guard lock(mutex_);
  const DevicePointer first = first_.load(std::memory_order_relaxed);
  const std::uint64_t bytes = bytes_.load(std::memory_order_relaxed);
  const DevicePointer low = bytes == 0 ? block.at : std::min(first, block.at);
  const DevicePointer high = std::max(first + bytes, block.at + block.size.count());
  blocks_.push_back(std::move(block));
  // Wider first: whoever sees the lower end sees the width that goes with it, and what was inside stays
  // inside for a reader in between.
  bytes_.store(high - low, std::memory_order_relaxed);
  first_.store(low, std::memory_order_release);
}

std::vector<Overflow::Block>::iterator Overflow::block_at(DevicePointer address) {
  return std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& each) { return each.at == address; });
}

std::optional<Overflow::Block> Overflow::take(DevicePointer address) {
  const std::lock_guard lock(mutex_);
  const auto found = block_at(address);
  if (found == blocks_.end()) return std::nullopt;
  std::optional<Block> block(std::move(*found));
  blocks_.erase(found);
  return block;
}

// Nobody uses it any more.
void Overflow::end(const Block& block) {
  OfDevice& on = *block.on;
  counts_[static_cast<std::size_t>(on.ordinal)].alive.fetch_sub(block.size.count());
  const DriverCalls& driver = *driver_calls();
  Bytes done;
  for (const HostHandlePool::Handle& handle : block.handles) {
    // What stays mapped stays ours, with its addresses.
    if (!on.device->unmap(address_of(block.at + done.count()), handle.size)) return on.closed.store(true);
    done += handle.size;
    (void)on.handles->give_back(handle);
  }
  (void)on.device->in_context([&] { return driver.release_range(block.at, block.size.count()); });
  if (kept_by(on) > kMostKept) (void)shrink_lease(on, kMostKept);
}

void Overflow::end_deferred() {
  std::vector<DevicePointer> waiting;
  {
    const std::lock_guard lock(mutex_);
    waiting.swap(deferred_);
  }
  for (const DevicePointer address : waiting) (void)free_now(address);
}

void Overflow::capture_ended() noexcept try {
  const ErrnoKept kept;
  end_deferred();
} catch (...) {  // with the next that HBM has no room for
}

std::optional<CallResult> Overflow::free_after(DevicePointer address, const auto& wait) {
  if (!may_hold(address)) return std::nullopt;
  const ErrnoKept kept;
  if (stream_pools().capturing()) {
    const std::lock_guard lock(mutex_);
    if (block_at(address) == blocks_.end()) return std::nullopt;
    deferred_.push_back(address);
    return kSuccess;
  }
  auto block = take(address);
  if (!block) return std::nullopt;
  const CallResult waited = wait(*block->on->device);
  if (waited != kSuccess) {
    put(*std::move(block));
    return waited;
  }
  end(*block);
  return kSuccess;
}

std::optional<CallResult> Overflow::free_now(DevicePointer address) noexcept try {
  return free_after(address, [](GuestDevice& device) {
    return device.in_context([] { return driver_calls()->context_synchronize(); });
  });
} catch (...) {  // it stays where it is
  return kSuccess;
}

std::optional<CallResult> Overflow::free_on(StreamName stream, DevicePointer address) noexcept try {
  return free_after(address, [stream](GuestDevice& device) {
    return device.in_context([&] { return driver_calls()->stream_synchronize(resolved(stream)); });
  });
} catch (...) {
  return kSuccess;
}

// ---------------------------------------------------------------- physical memory

bool Overflow::create(const Request& request, const AllocationProperties& wanted,
                      PhysicalHandle* out) noexcept try {
  // Compressed memory and tile pools are a device's alone.
  const bool special = wanted.flags[0] != 0 || wanted.flags[2] != 0 || wanted.flags[3] != 0;
  if (wanted.type != kPinnedMemory || special || current_device() != wanted.location.id) return false;
  const ErrnoKept kept;
  OfDevice* const on = ready(request);
  if (on == nullptr || round_up(request.size, on->handles->chunk()) != request.size) return false;
  std::optional<PhysicalHandle> handle;
  const auto take = [&] {
    const std::lock_guard lock(on->lease_mutex);
    if (!lease_more(*on, request.size)) return false;
    handle = take_handle(*on, request.size, wanted.requested_handle_types);
    if (!handle) handle = new_handle(*on, request.size, wanted.requested_handle_types);
    return handle.has_value();
  };
  if (!take() && (!others_gave_back(on->ordinal) || !take())) return refused_by_ddr(*on);
  {
    const std::lock_guard lock(mutex_);
    // An older one of this value has gone without a word to us.
    std::erase_if(given_, [&](const Given& each) { return each.handle == *handle; });
    given_.push_back({*handle, wanted.requested_handle_types, false});
  }
  physical_.store(true);
  served(*on, request.size);
  *out = *handle;
  return true;
} catch (...) {
  return false;
}

std::optional<PhysicalHandle> Overflow::take_handle(OfDevice& on, Bytes size, int types) {
  const std::lock_guard lock(on.kept_mutex);
  const auto found = std::find_if(on.kept.begin(), on.kept.end(), [&](const KeptHandle& each) {
    return each.size == size && each.types == types;
  });
  if (found == on.kept.end()) return std::nullopt;
  const PhysicalHandle handle = found->handle;
  on.kept.erase(found);
  on.kept_bytes -= size;
  recorder().shrank(TierId::kDdr, size);  // counted by who creates it
  return handle;
}

std::optional<PhysicalHandle> Overflow::new_handle(OfDevice& on, Bytes size, int types) {
  if (!on.lease->try_charge(size)) {
    drop_handles(on, size);
    (void)on.handles->trim(HostHandlePool::Until::kNothingIsKept);
    if (!on.lease->try_charge(size)) return std::nullopt;
  }
  const DriverCalls& driver = *driver_calls();
  AllocationProperties kind{};
  kind.type = kPinnedMemory;
  kind.requested_handle_types = types;
  kind.location = {LocationType::kHostNuma, on.handles->nodes().front()};
  PhysicalHandle handle = 0;
  const auto make = [&] { return driver.create(&handle, size.count(), &kind, 0); };
  CallResult result = on.device->in_context(make);
  if (result != kSuccess && result != kOutOfMemory && types != 0) {
    kind.requested_handle_types = 0;  // where nothing can be shown to others
    result = on.device->in_context(make);
  }
  if (result == kSuccess) return handle;
  on.lease->release(size);
  return std::nullopt;
}

void Overflow::drop_handles(OfDevice& on, Bytes enough) {
  const DriverCalls& driver = *driver_calls();
  const std::lock_guard lock(on.kept_mutex);
  while (enough > 0_B && !on.kept.empty()) {
    const KeptHandle last = on.kept.back();
    on.kept.pop_back();
    on.kept_bytes -= last.size;
    (void)on.device->in_context([&] { return driver.destroy(last.handle); });
    on.lease->release(last.size);
    recorder().shrank(TierId::kDdr, last.size);
    enough = saturating_sub(enough, last.size);
  }
}

bool Overflow::keeps(PhysicalHandle handle) noexcept try {
  if (!physical_.load(std::memory_order_relaxed)) return false;
  const auto known = physical_ledger().find(handle);
  if (!known || !is_overflow(known->allocation) || !known->last || known->withheld) return false;
  const std::lock_guard lock(mutex_);
  const OfDevice* const on = opened_[static_cast<std::size_t>(known->allocation.device)];
  if (on == nullptr || on->closed.load()) return false;
  return std::any_of(given_.begin(), given_.end(),
                     [&](const Given& each) { return each.handle == handle && !each.shown; });
} catch (...) {
  return false;
}

void Overflow::shown(PhysicalHandle handle) noexcept try {
  if (!physical_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  for (Given& each : given_) each.shown = each.shown || each.handle == handle;
} catch (...) {
}

void Overflow::ended(const Allocation& allocation, PhysicalHandle withheld) noexcept try {
  if (!is_overflow(allocation)) return;
  counts_[static_cast<std::size_t>(allocation.device)].alive.fetch_sub(allocation.size.count());
  OfDevice* on = nullptr;
  int types = 0;
  {
    const std::lock_guard lock(mutex_);
    on = opened_[static_cast<std::size_t>(allocation.device)];
    const auto given = std::find_if(given_.begin(), given_.end(),
                                    [&](const Given& each) { return each.handle == withheld; });
    if (given != given_.end()) {
      types = given->types;
      given_.erase(given);
    }
  }
  if (on == nullptr) return;
  if (withheld == 0) return on->lease->release(allocation.size);
  {
    const std::lock_guard lock(on->kept_mutex);
    on->kept.push_back({withheld, allocation.size, types});
    on->kept_bytes += allocation.size;
    recorder().grew(TierId::kDdr, allocation.size);
  }
  if (kept_by(*on) > kMostKept) (void)shrink_lease(*on, kMostKept);
} catch (...) {
}

// ---------------------------------------------------------------- what others ask

std::optional<Extent> Overflow::extent_around(DevicePointer address) noexcept {
  if (!may_hold(address)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  for (const Block& block : blocks_) {
    if (address - block.at < block.size.count()) return Extent{block.at, block.size.count()};
  }
  return std::nullopt;
}

std::optional<DeviceOrdinal> Overflow::device_of(DevicePointer address) noexcept try {
  if (may_hold(address)) {
    const std::lock_guard lock(mutex_);
    for (const Block& block : blocks_) {
      if (address - block.at < block.size.count()) return block.on->ordinal;
    }
  }
  if (!physical_.load(std::memory_order_relaxed)) return std::nullopt;
  const auto mapped = physical_ledger().mapped_at(address);
  return mapped && is_overflow(*mapped) ? std::optional<DeviceOrdinal>(mapped->device) : std::nullopt;
} catch (...) {
  return std::nullopt;
}

CallResult Overflow::share_with(DeviceOrdinal owner, DeviceOrdinal other) noexcept try {
  if (owner < 0 || owner >= kMostDevices || other < 0 || owner == other) return kSuccess;
  const std::lock_guard lock(mutex_);
  OfDevice* const on = opened_[static_cast<std::size_t>(owner)];
  return on == nullptr ? kSuccess : on->device->grant(other);
} catch (...) {
  return kOutOfMemory;
}

Overflow::Figures Overflow::figures(DeviceOrdinal device) const noexcept {
  if (device < 0 || device >= kMostDevices) return {};
  const Counts& counts = counts_[static_cast<std::size_t>(device)];
  return {Bytes(counts.alive.load()), Bytes(counts.peak.load()), counts.times.load()};
}

// What there was of it is gone, and nothing can be given back.
void Overflow::device_reset(DeviceOrdinal device) noexcept try {
  if (device < 0 || device >= kMostDevices) return;
  const std::lock_guard lock(mutex_);
  OfDevice* const on = opened_[static_cast<std::size_t>(device)];
  if (on == nullptr) return;
  on->closed.store(true);
  std::erase_if(blocks_, [&](const auto& block) { return block.on == on; });
  counts_[static_cast<std::size_t>(device)].alive.store(0);
} catch (...) {
}

void Overflow::process_ends() noexcept try {
  std::string lines;
  for (DeviceOrdinal device = 0; device < kMostDevices; ++device) {
    const Figures seen = figures(device);
    if (seen.times == 0) continue;
    lines += "terrace: device " + std::to_string(device) + ": " + format_bytes(seen.peak) +
             " of what PyTorch asked for lay in DDR at most (read over the link), in " +
             std::to_string(seen.times) + " allocations\n";
  }
  if (!lines.empty()) say_at_end(lines);
} catch (...) {
}

// The memory is the parent's, and who held the lock may not exist here.
void Overflow::start_again_in_child() noexcept {
  satisfied();
  new (this) Overflow;
}

}  // namespace terrace::hooks::cuda
