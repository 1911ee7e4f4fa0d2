#include "hooks/intercept/cuda/stable_blocks.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <string>

#include "hooks/intercept/cuda/forks.hpp"
#include "hooks/intercept/cuda/guest_uses.hpp"
#include "hooks/intercept/cuda/launch_view.hpp"
#include "hooks/intercept/cuda/shared_blocks.hpp"
#include "hooks/intercept/cuda/stream_pools.hpp"
#include "hooks/intercept/hook_settings.hpp"
#include "hooks/intercept/loaded_library.hpp"
#include "hooks/intercept/notice.hpp"
#include "hooks/intercept/wall.hpp"
#include "runtime/errno_kept.hpp"
#include "runtime/thread_signals.hpp"

namespace terrace::hooks::cuda {
namespace {

// Calls come while static objects go: no destructor runs.
union NeverDestroyed {
  constexpr NeverDestroyed() : blocks() {}
  ~NeverDestroyed() {}
  StableBlocks blocks;
};
constinit NeverDestroyed the;

constexpr Bytes kBatch = 256_MiB;
constexpr std::uint64_t kDdrSteps = 64;  // a lease of DDR grows by at least such a part of the budget

bool wanted_here() {
  const HookSettings& settings = hook_settings();
  if (settings.spill == SpillWord::kOff || settings.ddr_budget == 0_B) return false;
  return settings.spill == SpillWord::kAlways || !is_loaded("libc10_cuda.so");
}

bool ends_the_form(Errc code) {
  return code != Errc::kOutOfBudget && code != Errc::kOutOfMemory && code != Errc::kCancelled;
}

double link_seconds(Direction direction, CopyReason reason) {
  return static_cast<double>(metrics().value<Metric::kTransferSeconds>(direction, reason)) * 1e-9;
}

Address address_of(DevicePointer pointer) { return reinterpret_cast<Address>(pointer); }
const void* pointer_to(DevicePointer pointer) { return reinterpret_cast<const void*>(pointer); }

}  // namespace

StableBlocks& stable_blocks() noexcept { return the.blocks; }

bool allocates_for_others(const void* caller) noexcept {
  return is_in_library(caller, "libnccl.so") || is_in_library(caller, "libnvshmem_host.so") ||
         is_in_library(caller, "libuct_cuda.so");
}

// ---------------------------------------------------------------- which device

DeviceBlocks* StableBlocks::holding(DevicePointer address) const noexcept {
  if (!may_hold(address)) return nullptr;
  for (std::uint32_t i = 0; i < devices(); ++i) {
    if (at(i).holds(address)) return &at(i);
  }
  return nullptr;
}

DeviceBlocks* StableBlocks::of(ContextHandle context) const noexcept {
  for (std::uint32_t i = 0; i < devices(); ++i) {
    if (at(i).context == context) return &at(i);
  }
  return nullptr;
}

DeviceBlocks* StableBlocks::of_device(DeviceOrdinal device) const noexcept {
  for (std::uint32_t i = 0; i < devices(); ++i) {
    if (at(i).ordinal == device) return &at(i);
  }
  return nullptr;
}

std::unique_ptr<DeviceBlocks> StableBlocks::make(ContextHandle context, DeviceOrdinal ordinal) {
  const DriverCalls& driver = *driver_calls();
  const auto refused = [&](const Error& error) {
    say_once(Notice::kNoSpill,
             "device " + std::to_string(ordinal) + ": nothing leaves HBM for DDR (" + error.text + ")");
    return nullptr;
  };
  const SignalsBlocked blocked;
  auto made = std::make_unique<DeviceBlocks>();
  made->context = context;
  made->ordinal = ordinal;
  auto device = GuestDevice::open(driver, {context, ordinal, GuestDevice::Events::kTimed});
  if (!device) return refused(device.error());
  made->device = *std::move(device);
  for (DeviceOrdinal other = 0; other < kMostDevices; ++other) {
    if ((peers_[static_cast<std::size_t>(ordinal)] >> other & 1) != 0) (void)made->device->grant(other);
  }
  made->shared = peers_[static_cast<std::size_t>(ordinal)] != 0;
  if (LinkTime* const link = wall().link_time(ordinal)) made->device->share_link_time(*link);
  auto copies = CopyEngine::create(*made->device);
  if (!copies) return refused(copies.error());
  made->copies = *std::move(copies);
  made->streams = std::make_unique<GuestStreams>(*made->device, driver);
  if (lease_ == nullptr) lease_ = std::make_shared<HostLease>(0_B);
  made->lease = lease_;
  lease_ddr(ordinal, made->device->info().granularity);
  // Twice what there can be, so that addresses are found whatever the order of frees.
  const Bytes span = (made->device->info().capacity + hook_settings().ddr_budget) * 2;
  auto space = StableSpace::create(*made->device, *made->copies, *made->streams,
                                   {.span = span,
                                    .hbm_budget = made->device->info().capacity,
                                    .batch = kBatch,
                                    .lease = lease_,
                                    .nodes = {made->device->nearest_node()}});
  if (!space) return refused(space.error());
  made->space = *std::move(space);
  // Ahead of its use comes a share of the budget, however large.
  made->pager = std::make_unique<StablePager>(
      *made->space, StablePager::Options{.bytes_ahead = made->device->info().capacity});
  made->opened = steady_clock().now();
  return made;
}

DeviceBlocks* StableBlocks::open(ContextHandle context) {
  if (DeviceBlocks* known = of(context)) return known;
  watch_forks();
  const DeviceOrdinal ordinal = current_device();
  if (ordinal < 0 || ordinal >= kMostDevices) return nullptr;
  const std::lock_guard lock(mutex_);
  if (DeviceBlocks* known = of(context)) return known;
  const auto index = static_cast<std::size_t>(ordinal);
  // Of several contexts on a device only the first has blocks.
  if (failed_[index] || of_device(ordinal) != nullptr || !wanted_here()) return nullptr;
  failed_[index] = true;  // until it stands
  std::unique_ptr<DeviceBlocks> made = make(context, ordinal);
  if (made == nullptr) return nullptr;
  failed_[index] = false;
  int shown = 0;
  only_device_ = driver_calls()->device_count(&shown) == kSuccess && shown == 1;
  if (devices() == 0) (void)std::atexit([] { stable_blocks().process_ends(); });
  return publish(std::move(made));
}

// Wider first where it grows downwards: what was inside stays inside for a reader in between.
DeviceBlocks* StableBlocks::publish(std::unique_ptr<DeviceBlocks> blocks) {
  DeviceBlocks* const made = blocks.release();
  const std::uint32_t place = count_.load(std::memory_order_relaxed);
  made_[place].store(made, std::memory_order_relaxed);
  const DevicePointer own = reinterpret_cast<std::uintptr_t>(made->space->base());
  const DevicePointer first = first_.load(std::memory_order_relaxed);
  const std::uint64_t bytes = bytes_.load(std::memory_order_relaxed);
  const DevicePointer low = bytes == 0 ? own : std::min(first, own);
  const DevicePointer high = std::max(first + bytes, own + made->space->span().count());
  bytes_.store(high - low, std::memory_order_relaxed);
  first_.store(low, std::memory_order_release);
  count_.store(place + 1, std::memory_order_release);
  return made;
}

void StableBlocks::close(DeviceBlocks& blocks, std::string_view why) noexcept {
  if (blocks.closed.exchange(true)) return;
  try {
    say_once(Notice::kNoSpill, "device " + std::to_string(blocks.ordinal) +
                                   ": new allocations go to the driver and stay in HBM (" + std::string(why) +
                                   ")");
  } catch (...) {
  }
}

// ---------------------------------------------------------------- budgets

void StableBlocks::follow_the_wall(DeviceOrdinal device) noexcept try {
  if (DeviceBlocks* const blocks = of_device(device)) follow_the_wall(*blocks);
} catch (...) {  // the budget stays what it was
}

// The bytes that blocks may hold in HBM; set, so that what is taken next keeps to it.
Bytes StableBlocks::follow_the_wall(DeviceBlocks& blocks) {
  Bytes budget = blocks.device->info().capacity;
  blocks.device->with_charged([&](Bytes charged) {
    if (const auto room = wall().room(blocks.ordinal)) budget = charged + *room;
  });
  blocks.space->set_hbm_budget(budget);
  return budget;
}

// So that the DDR there is suffices for what is held beyond HBM, and for what is on its way.
void StableBlocks::lease_ddr(DeviceOrdinal device, Bytes needed) {
  const Bytes most = hook_settings().ddr_budget, now = lease_->budget();
  if (needed <= now || now >= most) return;
  const Bytes step = std::min(std::max(needed - now, most / kDdrSteps), most - now);
  lease_->set_budget(now + wall().lease_ddr(device, step));
}

// Before `more` is wanted in HBM beside all blocks, which may hold `hbm` there.
void StableBlocks::lease_ddr_for(DeviceBlocks& blocks, Bytes more, Bytes hbm) {
  const Bytes live = blocks.space->counters().live + more;
  if (live <= hbm) return;
  const std::lock_guard lock(mutex_);
  lease_ddr(blocks.ordinal, lease_->held() + (live - hbm) + kBatch * 2);
}

Result<Address> StableBlocks::take(DeviceBlocks& blocks, Bytes size) {
  lease_ddr_for(blocks, size, follow_the_wall(blocks));
  auto at = blocks.pager->allocate(size);
  if (at || at.error().code != Errc::kOutOfBudget) return at;
  if (lease_->room() < size) {
    say_once(Notice::kDdrFull,
             "HBM and DDR are full: " + format_bytes(lease_->held()) + " of the " +
                 format_bytes(lease_->budget()) +
                 " of DDR that this process may pin are in use; a larger ddr.budget makes room");
  }
  return at;
}

// What is beyond `left` leaves, as far as it can.
void StableBlocks::hold_no_more(DeviceBlocks& blocks, Bytes left) {
  blocks.space->set_hbm_budget(left);
  // Somebody may have taken a part of that room before the budget said that it was gone.
  if (blocks.space->hbm_held() > left) (void)blocks.pager->make_room(1_B);
}

Bytes StableBlocks::make_way(DeviceOrdinal device, Bytes bytes) noexcept try {
  DeviceBlocks* const blocks = of_device(device);
  if (blocks == nullptr || blocks->space->paused()) return {};
  const Bytes hbm = follow_the_wall(*blocks);
  if (bytes > hbm) return {};
  lease_ddr_for(*blocks, bytes, hbm);
  const Bytes before = blocks->space->hbm_held();
  const auto take = [&] { hold_no_more(*blocks, saturating_sub(follow_the_wall(*blocks), bytes)); };
  if (!blocks->pager->make_room(bytes, take)) return {};
  return saturating_sub(before, blocks->space->hbm_held());
} catch (...) {
  return {};
}

Bytes StableBlocks::give_way(DeviceOrdinal device, Bytes bytes) noexcept try {
  DeviceBlocks* const blocks = of_device(device);
  if (blocks == nullptr || blocks->space->paused()) return {};
  const Bytes hbm = follow_the_wall(*blocks);
  lease_ddr_for(*blocks, std::min(bytes, hbm), hbm);
  const Bytes before = blocks->space->hbm_held();
  // While the wall comes down it leaves what is charged and no more: `hbm` is what was there.
  const Bytes left = saturating_sub(hbm, bytes);
  if (!blocks->pager->make_room(bytes, [&] { hold_no_more(*blocks, left); })) hold_no_more(*blocks, left);
  return saturating_sub(before, blocks->space->hbm_held());
} catch (...) {
  return {};
}

// ---------------------------------------------------------------- allocate and free

bool StableBlocks::allocate(Kind kind, Bytes size, const void* caller, DevicePointer* out) noexcept try {
  if (size < (kind == Kind::kOrdered ? kLeastOrdered : kLeast)) return false;
  if (ending_.load(std::memory_order_relaxed) || stream_pools().capturing()) return false;
  const ErrnoKept kept;
  const DriverCalls* driver = driver_calls();
  ContextHandle context = nullptr;
  if (driver == nullptr || driver->context_get(&context) != kSuccess || context == nullptr) return false;
  if (wall().stands_aside() || allocates_for_others(caller)) return false;
  DeviceBlocks* const blocks = open(context);
  if (blocks == nullptr || blocks->closed.load(std::memory_order_relaxed)) return false;
  if (wall().switched_off(blocks->ordinal)) return false;
  const auto at = take(*blocks, size);
  if (!at) {
    if (ends_the_form(at.error().code)) close(*blocks, at.error().text);
    return false;
  }
  metrics().add<Metric::kAllocations>(TierId::kHbm, Pool::kScratch, 1);
  metrics().add<Metric::kAllocatedBytes>(TierId::kHbm, Pool::kScratch, size);
  *out = reinterpret_cast<std::uintptr_t>(*at);
  if (blocks->shared.load()) fix(*out, FixedReason::kPeer, Where::kBring);
  return true;
} catch (...) {  // no memory for our own notes, or no thread
  return false;
}

CallResult StableBlocks::end(DeviceBlocks& blocks, DevicePointer address) {
  {
    const std::lock_guard lock(mutex_);
    const auto fixed = fixed_at(address);
    if (fixed != fixed_.end()) {
      metrics().subtract<Metric::kFixedBytes>(fixed->reason, fixed->size);
      fixed_.erase(fixed);
    }
  }
  shared_blocks().ended(address);
  const Status freed = blocks.pager->free(address_of(address));
  return freed ? kSuccess : kInvalidValue;
}

std::optional<CallResult> StableBlocks::free_now(DevicePointer address) noexcept try {
  DeviceBlocks* const blocks = holding(address);
  if (blocks == nullptr) return std::nullopt;
  const ErrnoKept kept;
  const auto block = blocks->space->find(pointer_to(address));
  if (!block || block->at != address_of(address)) return kInvalidValue;
  if (defer_while_captured({{kLegacyStream, DefaultStream::kLegacy}, address})) return kSuccess;
  const DriverCalls& driver = *driver_calls();
  const CallResult waited = blocks->device->in_context([&] { return driver.context_synchronize(); });
  if (waited != kSuccess) {
    close(*blocks, "the context could not be waited for");
    return waited;
  }
  return end(*blocks, address);
} catch (...) {  // the block stays where it is
  return kSuccess;
}

std::optional<CallResult> StableBlocks::free_on(StreamName stream, DevicePointer address) noexcept try {
  DeviceBlocks* const blocks = holding(address);
  if (blocks == nullptr) return std::nullopt;
  const ErrnoKept kept;
  const auto block = blocks->space->find(pointer_to(address));
  if (!block || block->at != address_of(address)) return kInvalidValue;
  if (defer_while_captured({stream, address})) return kSuccess;
  {
    // What the stream has been given so far may use it, whether by our reading or not.
    GuestUses uses;
    uses.copy(stream, {&address, 1});
  }
  return end(*blocks, address);
} catch (...) {
  return kSuccess;
}

bool StableBlocks::defer_while_captured(const Deferred& free) {
  if (!stream_pools().capturing()) return false;
  const std::lock_guard lock(mutex_);
  if (!paused_) return false;
  deferred_.push_back(free);
  return true;
}

// ---------------------------------------------------------------- what stays where it is

std::vector<StableBlocks::Fixed>::iterator StableBlocks::fixed_at(DevicePointer address) {
  return std::find_if(fixed_.begin(), fixed_.end(),
                      [&](const Fixed& fixed) { return fixed.address == address; });
}

// With nothing moving: the caller has paused the space, or this does.
void StableBlocks::hold(DeviceBlocks& blocks, Address at) {
  (void)blocks.space->pause(kPatience);
  (void)blocks.space->hold(at);
  blocks.space->resume();
}

void StableBlocks::fix(DevicePointer address, FixedReason reason, Where where) noexcept try {
  DeviceBlocks* const blocks = holding(address);
  if (blocks == nullptr) return;
  const auto block = blocks->space->find(pointer_to(address));
  if (!block) return;
  const ErrnoKept kept;
  const DevicePointer key = reinterpret_cast<std::uintptr_t>(block->at);
  {
    const std::lock_guard lock(mutex_);
    if (fixed_at(key) != fixed_.end()) return;
    fixed_.push_back({key, reason, block->size});
    metrics().add<Metric::kFixedBytes>(reason, block->size);
  }
  if (where == Where::kBring && !blocks->space->paused()) {
    if (block->place == Place::kDdr) (void)blocks->pager->make_room(block->size);
    if (blocks->space->pin(block->at)) return;
  }
  hold(*blocks, block->at);
} catch (...) {
}

void StableBlocks::fix_all(DeviceBlocks& blocks, FixedReason reason, Where where) noexcept try {
  for (const StableSpace::View& block : blocks.space->blocks())
    fix(reinterpret_cast<std::uintptr_t>(block.at), reason, where);
} catch (...) {
}

void StableBlocks::show(DevicePointer address) noexcept try {
  DeviceBlocks* const blocks = holding(address);
  if (blocks == nullptr) return;
  const ErrnoKept kept;
  (void)blocks->space->show(pointer_to(address));
} catch (...) {
}

std::optional<Extent> StableBlocks::extent_around(DevicePointer address) const noexcept {
  const DeviceBlocks* const blocks = holding(address);
  const auto block = blocks == nullptr ? std::nullopt : blocks->space->find(pointer_to(address));
  if (!block) return std::nullopt;
  return Extent{reinterpret_cast<std::uintptr_t>(block->at), block->size.count()};
}

void StableBlocks::keep_reachable() noexcept try {
  const ErrnoKept kept;
  for (std::uint32_t i = 0; i < devices(); ++i) at(i).space->keep_reachable();
} catch (...) {
}

CallResult StableBlocks::share_with(DeviceOrdinal owner, DeviceOrdinal other) noexcept try {
  if (owner < 0 || owner >= kMostDevices || other < 0 || other >= kMostDevices || owner == other)
    return kSuccess;
  DeviceBlocks* blocks = nullptr;
  {
    const std::lock_guard lock(mutex_);
    peers_[static_cast<std::size_t>(owner)] |= std::uint64_t{1} << other;
    blocks = of_device(owner);
  }
  if (blocks == nullptr) return kSuccess;
  blocks->shared.store(true);
  // What is mapped while access is granted is mapped for good: nothing is exchanged meanwhile.
  (void)blocks->space->pause(kPatience);
  const CallResult granted = blocks->device->grant(other);
  blocks->space->resume();
  fix_all(*blocks, FixedReason::kPeer, Where::kBring);
  return granted;
} catch (...) {
  return kOutOfMemory;
}

std::uint64_t StableBlocks::peers_of(DeviceOrdinal owner) noexcept {
  const std::lock_guard lock(mutex_);
  return peers_[static_cast<std::size_t>(owner)];
}

// ---------------------------------------------------------------- captures, streams, ends

void StableBlocks::capture_begins() noexcept try {
  const std::lock_guard lock(mutex_);
  if (paused_) return;
  paused_ = true;
  for (std::uint32_t i = 0; i < devices(); ++i) (void)at(i).space->pause(kPatience);
} catch (...) {
}

void StableBlocks::capture_ended() noexcept try {
  std::vector<Deferred> waiting;
  {
    const std::lock_guard lock(mutex_);
    if (!paused_ || stream_pools().capturing()) return;
    paused_ = false;
    for (std::uint32_t i = 0; i < devices(); ++i) at(i).space->resume();
    waiting.swap(deferred_);
  }
  for (const Deferred& each : waiting) (void)free_on(each.stream, each.address);
} catch (...) {
}

void StableBlocks::stream_ends(StreamHandle stream) noexcept try {
  if (!any() || stream_pools().capturing()) return;
  const ErrnoKept kept;
  const DriverCalls& driver = *driver_calls();
  const RelaxedCapture relaxed(driver);
  // Afterwards nobody can come behind it.
  if (driver.stream_synchronize(stream) != kSuccess) return;
  for (std::uint32_t i = 0; i < devices(); ++i) {
    at(i).streams->ended(stream);
    at(i).device->end(stream);
  }
} catch (...) {
}

void StableBlocks::device_reset(DeviceOrdinal device) noexcept {
  if (DeviceBlocks* const blocks = of_device(device)) close(*blocks, "the device was reset");
}

void StableBlocks::process_ends() noexcept try {
  stop_moving();
  std::string lines;
  for (std::uint32_t i = 0; i < devices(); ++i) lines += exit_report(figures_of(at(i)));
  if (!lines.empty()) say_at_end(lines);
} catch (...) {
}

void StableBlocks::launched_unseen() noexcept {
  stop_moving();
  keep_reachable();
  for (std::uint32_t i = 0; i < devices(); ++i)
    close(at(i), "this runtime launches past the driver's functions");
}

void StableBlocks::stop_moving() noexcept try {
  if (ending_.exchange(true)) return;
  for (std::uint32_t i = 0; i < devices(); ++i) (void)at(i).space->pause(kPatience / 10);
} catch (...) {
}

ExitFigures StableBlocks::figures_of(const DeviceBlocks& blocks) {
  const StableSpace::Counters space = blocks.space->counters();
  const StablePager::Counters pager = blocks.pager->counters();
  ExitFigures figures{.device = blocks.ordinal,
                      .hbm_budget = wall().budget(blocks.ordinal),
                      .hbm_peak = wall().charged_peak(blocks.ordinal) + wall().context(blocks.ordinal),
                      .ddr_peak = space.in_ddr_peak,
                      .spilled = space.spilled,
                      .restored = space.restored,
                      .spill_seconds = link_seconds(Direction::kD2H, CopyReason::kSpill),
                      .restore_seconds = link_seconds(Direction::kH2D, CopyReason::kRestore),
                      .run = seconds_of(steady_clock().now() - blocks.opened),
                      .for_restores = seconds_of(pager.restore_wait),
                      .at_gates = space.wait_seconds,
                      .for_room = seconds_of(pager.budget_wait),
                      .uses_in_ddr = pager.in_place,
                      .moving = space.moving_seconds,
                      .both_ways = space.both_ways_seconds,
                      .remapping = space.remap_seconds,
                      .finding = space.prepare_seconds,
                      .ddr_made = space.host_made,
                      .shown = space.shown,
                      .ahead = pager.ahead,
                      .late = pager.demanded,
                      .step = pager.period,
                      .launches = metrics().value<Metric::kLaunches>(),
                      .opaque_launches = metrics().value<Metric::kOpaqueLaunches>(),
                      .first_opaque = first_opaque()};
  // What else is charged at the end stands for what else was charged at the peak.
  const Bytes others = saturating_sub(wall().charged(blocks.ordinal), space.hbm_held);
  figures.all_at_once = space.live_peak + others + wall().context(blocks.ordinal);
  const std::lock_guard lock(mutex_);
  for (const Fixed& fixed : fixed_) {
    if (blocks.holds(fixed.address)) figures.fixed += fixed.size;
  }
  return figures;
}

// The memory is the parent's, and its threads and locks do not exist here.
void StableBlocks::start_again_in_child() noexcept { new (this) StableBlocks; }

}  // namespace terrace::hooks::cuda
