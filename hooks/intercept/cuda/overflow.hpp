// Memory in DDR for allocations that find no room in HBM, in a process whose tensors are PyTorch's.
//
// PyTorch's allocator answers a refusal by giving back what it caches, and asks again: so the first refusal
// is passed on, and the second of the same size on the same thread, with nothing allocated in between, is
// served from the host's memory on the node nearest to the device. The device reads and writes it over the
// link, at a fiftieth of HBM's rate, and right to the last bit. It never moves, and no launch is looked at
// for it. Who allocates in order of a stream does not ask twice, nor do cuBLAS and its like: there the first
// refusal is served.
//
// A plain allocation is a range of its own with handles of host memory mapped in it; freed handles are kept
// for the next, up to kMostKept. Who creates physical memory gets a handle of host memory in place of the
// device's, and maps it himself.
//
// It is charged to DDR as blocks of stable addresses are, and refused where that is full. Nothing while
// something is captured, for a communication library, in a second context of a device, and where hook.spill
// or swapcore.mode is off. Nothing here throws. A forked child has none.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "allocator/host_handle_pool.hpp"
#include "hooks/intercept/allocation_table.hpp"
#include "hooks/intercept/cuda/guest_device.hpp"
#include "hooks/intercept/cuda/stream_name.hpp"

namespace terrace::hooks::cuda {

class Overflow {
 public:
  constexpr Overflow() = default;
  static constexpr int kMostDevices = 64;
  static constexpr Bytes kChunk = 64_MiB;    // handles are of this size, and of what is left of an allocation
  static constexpr Bytes kMostKept = 2_GiB;  // of freed handles, for each device

  enum class Form : std::uint8_t { kPlain, kOrdered, kPhysical };
  struct Request {
    Form form;
    Bytes size;
    const void* caller;
  };
  // HBM has no room for it, on the device of the current context. True: *out is in DDR. False: the guest is
  // told that there is no memory.
  [[nodiscard]] bool allocate(const Request& request, DevicePointer* out) noexcept;
  [[nodiscard]] bool create(const Request& request, const AllocationProperties& wanted,
                            PhysicalHandle* out) noexcept;
  // This thread has got what it asked for: the next refusal is a first one.
  static void satisfied() noexcept;

  // The answer to the call; nothing: no address of ours. free_now waits for the context first, as a driver
  // does; free_on waits for the stream.
  [[nodiscard]] std::optional<CallResult> free_now(DevicePointer address) noexcept;
  [[nodiscard]] std::optional<CallResult> free_on(StreamName stream, DevicePointer address) noexcept;
  // Physical memory. Whether the driver is not to be told of a handle's release, for it is kept for others.
  [[nodiscard]] bool keeps(PhysicalHandle handle) noexcept;
  void shown(PhysicalHandle handle) noexcept;  // to another process
  // It has gone, whose ever it was; `withheld`: a handle that the driver was not told of.
  static bool is_overflow(const Allocation& allocation) noexcept {
    return allocation.tier == TierId::kDdr && allocation.device >= 0;
  }
  void ended(const Allocation& allocation, PhysicalHandle withheld) noexcept;

  // The plain allocation that holds the address: the driver tells of one of its handles.
  [[nodiscard]] std::optional<Extent> extent_around(DevicePointer address) noexcept;
  // Whose memory the guest takes it for.
  [[nodiscard]] std::optional<DeviceOrdinal> device_of(DevicePointer address) noexcept;
  // Another device may reach what is on this one, now and later.
  [[nodiscard]] CallResult share_with(DeviceOrdinal owner, DeviceOrdinal other) noexcept;

  struct Figures {
    Bytes alive, peak;
    std::uint64_t times = 0;  // served
  };
  [[nodiscard]] Figures figures(DeviceOrdinal device) const noexcept;
  // A capture has ended: what was freed meanwhile goes.
  void capture_ended() noexcept;
  // Gives the DDR back that holds nothing. Returns how much of the lease that is.
  Bytes return_unused(DeviceOrdinal device) noexcept;
  void device_reset(DeviceOrdinal device) noexcept;
  void process_ends() noexcept;
  void start_again_in_child() noexcept;

 private:
  struct KeptHandle {
    PhysicalHandle handle = 0;
    Bytes size;
    int types = 0;  // of handles for others that were asked for
  };
  struct OfDevice {
    ContextHandle context = nullptr;
    DeviceOrdinal ordinal = -1;
    std::unique_ptr<GuestDevice> device{};
    std::shared_ptr<HostLease> lease{};
    std::unique_ptr<HostHandlePool> handles{};
    std::mutex lease_mutex{};  // the lease's budget, and what is taken of it: from the asking to the taking
    std::atomic<bool> closed{false};
    std::mutex kept_mutex{};  // the next two
    std::vector<KeptHandle> kept{};
    Bytes kept_bytes{};
  };
  struct Block {
    OfDevice* on = nullptr;
    Bytes size;
    DevicePointer at = 0;
    std::vector<HostHandlePool::Handle> handles{};
  };
  struct Counts {
    std::atomic<std::uint64_t> alive{0}, peak{0}, times{0};
  };
  [[nodiscard]] static bool is_due(const Request& request, DeviceOrdinal device) noexcept;
  [[nodiscard]] OfDevice* ready(const Request& request);
  [[nodiscard]] OfDevice* open(ContextHandle context, DeviceOrdinal ordinal);
  [[nodiscard]] std::unique_ptr<OfDevice> make(ContextHandle context, DeviceOrdinal ordinal);
  [[nodiscard]] static bool lease_more(OfDevice& on, Bytes size);
  [[nodiscard]] bool others_gave_back(DeviceOrdinal device);
  [[nodiscard]] static bool refused_by_ddr(const OfDevice& on);
  static Bytes shrink_lease(OfDevice& on, Bytes keep);
  [[nodiscard]] static Bytes kept_by(OfDevice& on);
  static void drop_handles(OfDevice& on, Bytes enough);
  [[nodiscard]] static std::optional<PhysicalHandle> take_handle(OfDevice& on, Bytes size, int types);
  [[nodiscard]] static std::optional<PhysicalHandle> new_handle(OfDevice& on, Bytes size, int types);
  [[nodiscard]] static bool take_handles(OfDevice& on, Block& block);
  [[nodiscard]] static std::optional<DevicePointer> map(OfDevice& on, const Block& block);
  static void give_back(OfDevice& on, const std::vector<HostHandlePool::Handle>& handles);
  void served(OfDevice& on, Bytes size);
  [[nodiscard]] std::vector<Block>::iterator block_at(DevicePointer address);  // mutex_ held
  [[nodiscard]] std::optional<Block> take(DevicePointer address);
  void put(Block block);
  void end(const Block& block);
  void end_deferred();
  [[nodiscard]] std::optional<CallResult> free_after(DevicePointer address, const auto& wait);
  [[nodiscard]] bool may_hold(DevicePointer address) const noexcept {
    const DevicePointer first = first_.load(std::memory_order_acquire);  // before the other: see put()
    return address - first < bytes_.load(std::memory_order_relaxed);
  }

  std::array<Counts, kMostDevices> counts_{};
  std::atomic<bool> physical_{false};  // handles were given out
  // All ranges there were lie inside; it only grows.
  std::atomic<DevicePointer> first_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::mutex mutex_;                              // all below, and opening a device
  std::array<OfDevice*, kMostDevices> opened_{};  // never destroyed
  std::array<bool, kMostDevices> failed_{};
  std::vector<Block> blocks_;
  std::vector<DevicePointer> deferred_;  // freed while something was captured
  struct Given {
    PhysicalHandle handle;
    int types;
    bool shown;
  };
  std::vector<Given> given_;  // handles that the guest has
};

// The one of this process; never destroyed.
[[nodiscard]] Overflow& overflow() noexcept;

}  // namespace terrace::hooks::cuda
