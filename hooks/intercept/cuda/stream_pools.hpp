// Stream-ordered allocations served from pools of ours inside the process, one for each device: what
// `terrace run --allocator terrace` does, and terrace_torch_alloc in every mode.
//
// A pool stands where the driver's default pool of its device would. What it cannot serve goes to the driver:
// allocations while any stream is captured, on per-thread default streams, in other contexts, when the wall
// or a fault leaves it no memory. Its blocks stay valid whatever happens; a fault ends new allocations only.
// Freed memory stays with the pool until somebody trims it, or an allocation that goes past it needs room.
//
// Nothing here throws. A forked child has no pools.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator/hbm_pool.hpp"
#include "hooks/intercept/cuda/guest_device.hpp"
#include "hooks/intercept/cuda/stream_name.hpp"

namespace terrace::hooks::cuda {

class StreamPools {
 public:
  constexpr StreamPools() = default;
  static constexpr int kMostDevices = 64;

  // True: *out is a block. False: the driver's turn.
  [[nodiscard]] bool allocate(StreamName stream, Bytes size, DevicePointer* out) noexcept;
  // The same whatever the mode.
  [[nodiscard]] bool allocate_always(StreamName stream, Bytes size, DevicePointer* out) noexcept;
  // The answer to the call; nothing: not memory of a pool.
  [[nodiscard]] std::optional<CallResult> free(StreamName stream, DevicePointer address) noexcept;
  [[nodiscard]] std::optional<CallResult> free_now(DevicePointer address) noexcept;
  [[nodiscard]] bool holds(DevicePointer address) const noexcept { return pool_holding(address) != nullptr; }
  // The live block around an address, interior ones included. Wait-free.
  [[nodiscard]] std::optional<Block> find(DevicePointer address) const noexcept {
    const DevicePool* pool = pool_holding(address);
    if (pool == nullptr) return std::nullopt;
    return pool->pool->find(reinterpret_cast<const std::byte*>(address));
  }
  // Addresses outside of this lie in no pool. Empty while there is none.
  struct Span {
    DevicePointer first = 0;
    std::uint64_t bytes = 0;
    [[nodiscard]] bool may_hold(DevicePointer address) const { return address - first < bytes; }
  };
  [[nodiscard]] Span span() const noexcept {
    return {span_first_.load(std::memory_order_relaxed), span_bytes_.load(std::memory_order_relaxed)};
  }
  [[nodiscard]] bool any() const noexcept { return any_.load(std::memory_order_relaxed); }

  // Whether the pool of the current device stands for this one of the driver's.
  [[nodiscard]] bool stands_for(PoolHandle pool) noexcept;
  void add_attribute(PoolHandle pool, PoolAttribute attribute, void* value) noexcept;
  void reset_attribute(PoolHandle pool, PoolAttribute attribute) noexcept;
  void trim(PoolHandle pool, Bytes keep) noexcept;
  Bytes trim(DeviceOrdinal device) noexcept;  // returns what went back to the device
  // What the pool of a device holds beyond its live blocks.
  [[nodiscard]] Bytes unused(DeviceOrdinal device) const noexcept;
  [[nodiscard]] CallResult set_access(PoolHandle pool, std::span<const AccessDescription> who) noexcept;
  void device_uses(DeviceOrdinal device, PoolHandle pool) noexcept;

  // Some stream is captured. Wait-free.
  [[nodiscard]] bool capturing() const noexcept { return captures_.load(std::memory_order_acquire) != 0; }
  void stream_ends(StreamHandle stream) noexcept;
  void capture_begins(StreamName stream) noexcept;
  void capture_ends(StreamName stream) noexcept;
  void device_reset(DeviceOrdinal device) noexcept;
  void start_again_in_child() noexcept;

 private:
  struct DevicePool {
    ContextHandle context;
    DeviceOrdinal ordinal;
    PoolHandle stands_for;
    std::unique_ptr<GuestDevice> device;
    std::unique_ptr<HbmPool> pool;
    std::atomic<bool> closed{false};  // to new allocations
  };
  struct Place {
    DevicePool* pool = nullptr;
    Stream stream;
  };
  struct Deferred {
    StreamName stream;
    DevicePointer address;
  };
  [[nodiscard]] std::optional<Place> place_of(StreamName stream);
  [[nodiscard]] DevicePool* pool_of(ContextHandle context);
  [[nodiscard]] DevicePool* make_pool(ContextHandle context);
  [[nodiscard]] DevicePool* pool_holding(DevicePointer address) const noexcept {
    const std::uint32_t count = made_count_.load(std::memory_order_acquire);
    for (std::uint32_t i = 0; i < count; ++i) {
      DevicePool* pool = made_[i].load(std::memory_order_relaxed);
      if (pool->device->holds(address)) return pool;
    }
    return nullptr;
  }
  [[nodiscard]] DevicePool* pool_standing_for(PoolHandle pool) const noexcept;
  [[nodiscard]] CallResult free_in(DevicePool& pool, StreamName stream, DevicePointer address);
  void free_deferred();
  [[nodiscard]] bool defer_while_captured(const Deferred& free);
  void close(DevicePool& pool, std::string_view why) noexcept;

  std::array<std::atomic<DevicePool*>, kMostDevices> pools_{};  // by device; never destroyed
  std::array<std::atomic<DevicePool*>, kMostDevices>
      made_{};  // the same without gaps, for look-ups by address
  std::atomic<std::uint32_t> made_count_{0};
  std::atomic<DevicePointer> span_first_{0};
  std::atomic<std::uint64_t> span_bytes_{0};
  std::array<std::atomic<bool>, kMostDevices> other_pool_{};  // the device's pool is one of the guest's
  std::atomic<bool> any_{false};
  std::atomic<std::uint64_t> generation_{1};  // of what threads remember of streams
  std::atomic<std::uint32_t> captures_{0};
  std::atomic<bool> has_deferred_{false};
  std::mutex mutex_;  // all below, and making a pool
  std::array<bool, kMostDevices> failed_{};
  std::vector<std::pair<StreamHandle, std::uint64_t>>
      captured_;  // with the thread, for its own default stream
  std::vector<Deferred> deferred_;
};

// The one of this process; never destroyed.
[[nodiscard]] StreamPools& stream_pools() noexcept;

}  // namespace terrace::hooks::cuda
