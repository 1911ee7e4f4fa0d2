#include "hooks/intercept/cuda/stream_pools.hpp"

#include <algorithm>
#include <new>
#include <string>

#include "hooks/intercept/cuda/forks.hpp"
#include "hooks/intercept/hook_settings.hpp"
#include "hooks/intercept/notice.hpp"
#include "hooks/intercept/wall.hpp"
#include "runtime/metrics.hpp"

namespace terrace::hooks::cuda {
namespace {

constexpr Pool kPurpose = Pool::kScratch;  // whom a tensor serves is not known here

// Calls come while static objects go: no destructor runs.
union NeverDestroyed {
  constexpr NeverDestroyed() : pools() {}
  ~NeverDestroyed() {}
  StreamPools pools;
};
constinit NeverDestroyed the;

// Tells the threads' own default streams apart.
std::uint64_t this_thread() noexcept {
  static constinit std::atomic<std::uint64_t> last{0};
  thread_local constinit std::uint64_t own = 0;
  if (own == 0) own = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return own;
}

// What a thread remembers of the stream it used last.
struct Remembered {
  StreamHandle handle = nullptr;
  ContextHandle context = nullptr;  // of the legacy stream, which every context has
  std::uint64_t generation = 0;
  void* pool = nullptr;
  Stream stream{};
};
thread_local constinit Remembered remembered;

bool ends_the_pool(Errc code) { return code != Errc::kOutOfBudget && code != Errc::kOutOfMemory; }

}  // namespace

StreamPools& stream_pools() noexcept { return the.pools; }

// ---------------------------------------------------------------- which pool

std::optional<StreamPools::Place> StreamPools::place_of(StreamName name) {
  const DriverCalls* driver = driver_calls();
  const StreamHandle handle = resolved(name);
  // Another thread's default stream cannot be named, so that nothing could be ordered behind it.
  if (driver == nullptr || handle == kPerThreadStream) return std::nullopt;
  ContextHandle context = nullptr;
  if (handle == kLegacyStream && (driver->context_get(&context) != kSuccess || context == nullptr))
    return std::nullopt;
  const std::uint64_t generation = generation_.load(std::memory_order_acquire);
  if (remembered.handle == handle && remembered.context == context && remembered.generation == generation)
    return Place{static_cast<DevicePool*>(remembered.pool), remembered.stream};
  ContextHandle owner = context;
  if (owner == nullptr) {
    const RelaxedCapture relaxed(*driver);
    if (driver->stream_context(handle, &owner) != kSuccess || owner == nullptr) return std::nullopt;
  }
  DevicePool* pool = pool_of(owner);
  if (pool == nullptr) return std::nullopt;
  remembered = {handle, context, generation, pool, pool->device->adopt(handle)};
  return Place{pool, remembered.stream};
}

StreamPools::DevicePool* StreamPools::pool_of(ContextHandle context) {
  for (auto& slot : pools_) {
    DevicePool* pool = slot.load(std::memory_order_acquire);
    if (pool != nullptr && pool->context == context) return pool;
  }
  return make_pool(context);
}

StreamPools::DevicePool* StreamPools::make_pool(ContextHandle context) {
  watch_forks();
  const DriverCalls& driver = *driver_calls();
  DeviceOrdinal ordinal = -1;
  PoolHandle stands_for = nullptr;
  {
    const CurrentContext current(driver, context);
    if (current.result() != kSuccess || driver.context_device(&ordinal) != kSuccess) return nullptr;
    if (driver.device_default_pool(&stands_for, ordinal) != kSuccess) return nullptr;
  }
  if (ordinal < 0 || ordinal >= kMostDevices) return nullptr;
  const auto index = static_cast<std::size_t>(ordinal);
  const std::lock_guard lock(mutex_);
  if (failed_[index]) return nullptr;
  if (DevicePool* other = pools_[index].load()) return other->context == context ? other : nullptr;
  const auto failed = [&](const Error& error) {
    failed_[index] = true;
    say_once(Notice::kPoolLost, "no pool on device " + std::to_string(ordinal) + " (" + error.text +
                                    "): allocations go to the driver");
    return nullptr;
  };
  auto device = GuestDevice::open(driver, {context, ordinal});
  if (!device) return failed(device.error());
  // The wall decides how much of it there is.
  auto pool = HbmPool::create(**device, {.budget = (*device)->info().capacity});
  if (!pool) return failed(pool.error());
  auto* made = new DevicePool{context, ordinal, stands_for, *std::move(device), *std::move(pool)};
  pools_[index].store(made, std::memory_order_release);
  const std::uint32_t place = made_count_.load(std::memory_order_relaxed);
  made_[place].store(made, std::memory_order_relaxed);
  // Wider first where it grows downwards: what was inside stays inside for a reader in between.
  const Span before = span();
  const Span own{made->device->reserved_at(), made->device->reserved_bytes()};
  const DevicePointer first = before.bytes == 0 ? own.first : std::min(before.first, own.first);
  const DevicePointer end = std::max(before.first + before.bytes, own.first + own.bytes);
  span_bytes_.store(std::max<std::uint64_t>(end - first, before.bytes), std::memory_order_relaxed);
  span_first_.store(first, std::memory_order_relaxed);
  made_count_.store(place + 1, std::memory_order_release);
  any_.store(true, std::memory_order_release);
  return made;
}

StreamPools::DevicePool* StreamPools::pool_standing_for(PoolHandle handle) const noexcept {
  if (!any()) return nullptr;
  for (const auto& slot : pools_) {
    DevicePool* pool = slot.load(std::memory_order_acquire);
    if (pool != nullptr && pool->stands_for == handle) return pool;
  }
  return nullptr;
}

// ---------------------------------------------------------------- allocate and free

bool StreamPools::allocate(StreamName stream, Bytes size, DevicePointer* out) noexcept {
  return hook_settings().allocator == AllocatorMode::kTerrace && allocate_always(stream, size, out);
}

bool StreamPools::allocate_always(StreamName stream, Bytes size, DevicePointer* out) noexcept try {
  // A captured allocation belongs to its graph, and a fence of ours must not become part of one.
  if (size == 0_B || captures_.load(std::memory_order_acquire) != 0) return false;
  if (has_deferred_.load(std::memory_order_acquire)) free_deferred();
  const auto place = place_of(stream);
  if (!place || place->pool->closed.load(std::memory_order_relaxed)) return false;
  if (other_pool_[static_cast<std::size_t>(place->pool->ordinal)].load(std::memory_order_relaxed))
    return false;
  if (wall().switched_off(place->pool->ordinal) || wall().stands_aside()) return false;
  const auto block = place->pool->pool->allocate(place->stream, size, kPurpose);
  if (!block) {
    // The lease or the device is full: the driver says so in its own way.
    if (ends_the_pool(block.error().code)) close(*place->pool, block.error().text);
    return false;
  }
  metrics().add<Metric::kAllocations>(TierId::kHbm, kPurpose, 1);
  metrics().add<Metric::kAllocatedBytes>(TierId::kHbm, kPurpose, size);
  *out = reinterpret_cast<std::uintptr_t>(block->address);
  return true;
} catch (...) {  // no memory for our own notes
  return false;
}

std::optional<CallResult> StreamPools::free(StreamName stream, DevicePointer address) noexcept try {
  DevicePool* pool = pool_holding(address);
  if (pool == nullptr) return std::nullopt;
  if (defer_while_captured({stream, address})) return kSuccess;
  if (has_deferred_.load(std::memory_order_acquire)) free_deferred();
  return free_in(*pool, stream, address);
} catch (...) {  // the block stays where it is
  return kSuccess;
}

CallResult StreamPools::free_in(DevicePool& pool, StreamName stream, DevicePointer address) {
  const auto at = reinterpret_cast<std::byte*>(address);
  const auto block = pool.pool->find(at);
  if (!block || block->address != at) return kInvalidValue;
  const auto place = place_of(stream);
  if (place && place->pool == &pool) {
    const Status freed = pool.pool->free(place->stream, *block);
    if (freed) return kSuccess;
    if (freed.error().code == Errc::kInvalidArgument) return kInvalidValue;
    if (ends_the_pool(freed.error().code)) {
      close(pool, freed.error().text);
      return kSuccess;
    }
  }
  // A stream that the pool does not order by: its work so far is waited for.
  const DriverCalls& driver = *driver_calls();
  const RelaxedCapture relaxed(driver);
  const CallResult waited = driver.stream_synchronize(resolved(stream));
  if (waited != kSuccess) {
    close(pool, "a stream could not be waited for");
    return waited;
  }
  return pool.pool->free_completed(*block) ? kSuccess : kInvalidValue;
}

std::optional<CallResult> StreamPools::free_now(DevicePointer address) noexcept try {
  DevicePool* pool = pool_holding(address);
  if (pool == nullptr) return std::nullopt;
  if (defer_while_captured({{kLegacyStream, DefaultStream::kLegacy}, address})) return kSuccess;
  const auto at = reinterpret_cast<std::byte*>(address);
  const auto block = pool->pool->find(at);
  if (!block || block->address != at) return kInvalidValue;
  const DriverCalls& driver = *driver_calls();
  const CurrentContext current(driver, pool->context);
  const CallResult waited = current.result() == kSuccess ? driver.context_synchronize() : current.result();
  if (waited != kSuccess) {
    close(*pool, "the context could not be waited for");
    return waited;
  }
  return pool->pool->free_completed(*block) ? kSuccess : kInvalidValue;
} catch (...) {
  return kSuccess;
}

bool StreamPools::defer_while_captured(const Deferred& free) {
  if (captures_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(mutex_);
  if (captured_.empty()) return false;
  deferred_.push_back(free);
  has_deferred_.store(true, std::memory_order_release);
  return true;
}

// Frees that came while something was captured; ordering them later than asked is safe.
void StreamPools::free_deferred() {
  if (captures_.load(std::memory_order_acquire) != 0) return;
  std::vector<Deferred> waiting;
  {
    const std::lock_guard lock(mutex_);
    waiting.swap(deferred_);
    has_deferred_.store(false, std::memory_order_release);
  }
  for (const Deferred& each : waiting) {
    if (DevicePool* pool = pool_holding(each.address)) (void)free_in(*pool, each.stream, each.address);
  }
}

void StreamPools::close(DevicePool& pool, std::string_view why) noexcept {
  if (pool.closed.exchange(true)) return;
  say_once(Notice::kPoolLost, "the pool of device " + std::to_string(pool.ordinal) +
                                  " takes no new allocations (" + std::string(why) +
                                  "): they go to the driver");
}

// ---------------------------------------------------------------- the pool as the driver's

bool StreamPools::stands_for(PoolHandle pool) noexcept {
  if (pool_standing_for(pool) != nullptr) return true;
  const DriverCalls* driver = driver_calls();
  PoolHandle default_pool = nullptr;
  return driver != nullptr && driver->device_default_pool(&default_pool, current_device()) == kSuccess &&
         default_pool == pool;
}

void StreamPools::add_attribute(PoolHandle handle, PoolAttribute attribute, void* value) noexcept {
  const DevicePool* pool = pool_standing_for(handle);
  if (pool == nullptr || value == nullptr) return;
  const PoolUsage usage = pool->pool->usage();
  Bytes ours;
  if (attribute == PoolAttribute::kReservedCurrent) ours = usage.mapped;
  if (attribute == PoolAttribute::kReservedHigh) ours = usage.mapped_peak;
  if (attribute == PoolAttribute::kUsedCurrent) ours = usage.live;
  if (attribute == PoolAttribute::kUsedHigh) ours = usage.live_peak;
  if (ours > 0_B) *static_cast<std::uint64_t*>(value) += ours.count();
}

void StreamPools::reset_attribute(PoolHandle handle, PoolAttribute attribute) noexcept {
  DevicePool* pool = pool_standing_for(handle);
  const bool is_peak = attribute == PoolAttribute::kReservedHigh || attribute == PoolAttribute::kUsedHigh;
  if (pool != nullptr && is_peak) pool->pool->reset_peaks();
}

void StreamPools::trim(PoolHandle handle, Bytes keep) noexcept {
  const DevicePool* pool = pool_standing_for(handle);
  if (pool != nullptr && pool->pool->usage().mapped > keep) (void)trim(pool->ordinal);
}

Bytes StreamPools::trim(DeviceOrdinal device) noexcept try {
  if (!any() || device < 0 || device >= kMostDevices) return {};
  if (has_deferred_.load(std::memory_order_acquire)) free_deferred();
  DevicePool* pool = pools_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
  return pool == nullptr ? Bytes() : pool->pool->trim();
} catch (...) {
  return {};
}

Bytes StreamPools::unused(DeviceOrdinal device) const noexcept {
  if (!any() || device < 0 || device >= kMostDevices) return {};
  const DevicePool* pool = pools_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
  if (pool == nullptr) return {};
  const PoolUsage usage = pool->pool->usage();
  return saturating_sub(usage.mapped, usage.live);
}

CallResult StreamPools::set_access(PoolHandle handle, std::span<const AccessDescription> who) noexcept try {
  DevicePool* pool = pool_standing_for(handle);
  if (pool == nullptr) return kSuccess;
  for (const AccessDescription& each : who) {
    if (each.location.type != LocationType::kDevice || each.location.id == pool->ordinal || each.flags == 0)
      continue;
    if (const CallResult result = pool->device->grant(each.location.id); result != kSuccess) return result;
  }
  return kSuccess;
} catch (...) {
  return kOutOfMemory;
}

void StreamPools::device_uses(DeviceOrdinal device, PoolHandle pool) noexcept {
  const DriverCalls* driver = driver_calls();
  PoolHandle default_pool = nullptr;
  if (driver == nullptr || device < 0 || device >= kMostDevices) return;
  if (driver->device_default_pool(&default_pool, device) != kSuccess) return;
  other_pool_[static_cast<std::size_t>(device)].store(pool != default_pool, std::memory_order_relaxed);
}

// ---------------------------------------------------------------- streams, captures, ends

void StreamPools::stream_ends(StreamHandle handle) noexcept try {
  capture_ends({handle, DefaultStream::kLegacy});
  if (!any()) return;
  for (auto& slot : pools_) {
    DevicePool* pool = slot.load(std::memory_order_acquire);
    if (pool == nullptr || !pool->device->knows(handle)) continue;
    // The pool takes a stream that has ended for one whose work is over.
    const DriverCalls& driver = *driver_calls();
    const RelaxedCapture relaxed(driver);
    if (driver.stream_synchronize(handle) != kSuccess) close(*pool, "a stream could not be waited for");
    pool->device->end(handle);
    generation_.fetch_add(1, std::memory_order_acq_rel);
  }
} catch (...) {
}

void StreamPools::capture_begins(StreamName stream) noexcept try {
  watch_forks();
  const StreamHandle handle = resolved(stream);
  const std::lock_guard lock(mutex_);
  captured_.emplace_back(handle, handle == kPerThreadStream ? this_thread() : 0);
  captures_.store(static_cast<std::uint32_t>(captured_.size()), std::memory_order_release);
} catch (...) {
}

void StreamPools::capture_ends(StreamName stream) noexcept {
  if (captures_.load(std::memory_order_acquire) == 0) return;
  const StreamHandle handle = resolved(stream);
  const std::pair ended(handle, handle == kPerThreadStream ? this_thread() : 0);
  const std::lock_guard lock(mutex_);
  const auto found = std::find(captured_.begin(), captured_.end(), ended);
  if (found != captured_.end()) captured_.erase(found);
  captures_.store(static_cast<std::uint32_t>(captured_.size()), std::memory_order_release);
}

// What the pool had on the device is gone, and nothing of it can be given back.
void StreamPools::device_reset(DeviceOrdinal device) noexcept {
  if (!any() || device < 0 || device >= kMostDevices) return;
  DevicePool* pool = pools_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
  if (pool != nullptr) close(*pool, "the device was reset");
  generation_.fetch_add(1, std::memory_order_acq_rel);
}

// The memory is the parent's, and who held the lock may not exist here.
void StreamPools::start_again_in_child() noexcept {
  const std::uint64_t generation = generation_.load(std::memory_order_relaxed);
  new (this) StreamPools;
  generation_.store(generation + 1, std::memory_order_release);
}

}  // namespace terrace::hooks::cuda
