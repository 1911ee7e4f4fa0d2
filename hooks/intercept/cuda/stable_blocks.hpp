// The stable-address form inside a guest: large blocks whose memory is exchanged between HBM and DDR under
// the pointers of a program that knows nothing of it (swapcore/stable/,
// docs/design/0013-stable-addresses.md).
//
// What becomes such a block: allocations of the driver's plain kind from 1 MiB on, stream-ordered ones from
// 32 MiB on and smaller ones where the wall refuses them; nothing while a stream is captured, nothing that a
// communication library allocates for itself, and nothing at all in a process that has PyTorch loaded unless
// hook.spill says so: there the plugin's handle form is the first choice. All else stays with the driver.
//
// A block stays where it is for good once somebody else has seen its memory: captured, shared with another
// process, registered, or used by another device. Frees while something is captured wait for its end.
//
// Nothing here throws. A fault closes the form to new blocks and leaves those there are valid. A forked child
// has none.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "hooks/intercept/cuda/guest_streams.hpp"
#include "hooks/intercept/cuda/stream_name.hpp"
#include "hooks/intercept/exit_report.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/stable/stable_pager.hpp"

namespace terrace::hooks::cuda {

// The blocks of one device, in one context.
struct DeviceBlocks {
  ContextHandle context = nullptr;
  DeviceOrdinal ordinal = -1;
  std::unique_ptr<GuestDevice> device{};
  std::unique_ptr<CopyEngine> copies{};
  std::unique_ptr<GuestStreams> streams{};
  std::shared_ptr<HostLease> lease{};
  std::unique_ptr<StableSpace> space{};
  std::unique_ptr<StablePager> pager{};
  Nanoseconds opened{};
  std::atomic<bool> closed{false};  // to new blocks
  std::atomic<bool> shared{false};  // with another device: every block is fixed

  [[nodiscard]] bool holds(DevicePointer address) const {
    return address - reinterpret_cast<std::uintptr_t>(space->base()) < space->span().count();
  }
};

class StableBlocks {
 public:
  constexpr StableBlocks() = default;
  static constexpr int kMostDevices = 64;
  static constexpr Bytes kLeast = 1_MiB;          // of a plain allocation
  static constexpr Bytes kLeastOrdered = 32_MiB;  // of a stream-ordered one
  // A blocked wait for moves under way, where a capture begins or the process ends.
  static constexpr std::chrono::milliseconds kPatience{20000};

  // True: *out is a block, on the device of the current context. False: the driver's turn.
  enum class Kind : std::uint8_t { kPlain, kOrdered, kRefused };
  [[nodiscard]] bool allocate(Kind kind, Bytes size, const void* caller, DevicePointer* out) noexcept;
  // The answer to the call; nothing: no address of ours. free_now waits for the context first, as a driver
  // does; free_on comes behind the stream's work.
  [[nodiscard]] std::optional<CallResult> free_now(DevicePointer address) noexcept;
  [[nodiscard]] std::optional<CallResult> free_on(StreamName stream, DevicePointer address) noexcept;

  [[nodiscard]] bool any() const noexcept { return count_.load(std::memory_order_acquire) != 0; }
  // Addresses outside of this lie in no block of any device. Empty while there is none.
  struct Span {
    DevicePointer first = 0;
    std::uint64_t bytes = 0;
    [[nodiscard]] bool may_hold(DevicePointer address) const { return address - first < bytes; }
  };
  [[nodiscard]] Span span() const noexcept {
    const DevicePointer first = first_.load(std::memory_order_acquire);  // before the width that goes with it
    return {first, bytes_.load(std::memory_order_relaxed)};
  }
  [[nodiscard]] bool may_hold(DevicePointer address) const noexcept { return span().may_hold(address); }
  [[nodiscard]] DeviceBlocks* holding(DevicePointer address) const noexcept;
  [[nodiscard]] DeviceBlocks* of(ContextHandle context) const noexcept;
  [[nodiscard]] DeviceBlocks* of_device(DeviceOrdinal device) const noexcept;
  // The machine shows one device, and it has blocks.
  [[nodiscard]] bool only_device() const noexcept { return only_device_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint32_t devices() const noexcept { return count_.load(std::memory_order_acquire); }
  [[nodiscard]] DeviceBlocks& at(std::uint32_t index) const noexcept {
    return *made_[index].load(std::memory_order_relaxed);
  }

  // The block around an address stays where it is, or (kBring) comes to HBM first and stays there. Nothing
  // where there is none.
  enum class Where : std::uint8_t { kBring, kLeave };
  void fix(DevicePointer address, FixedReason reason, Where where) noexcept;
  void fix_all(DeviceBlocks& blocks, FixedReason reason, Where where) noexcept;
  // Another device may reach what is on this one: all of it, now and later.
  [[nodiscard]] CallResult share_with(DeviceOrdinal owner, DeviceOrdinal other) noexcept;
  [[nodiscard]] std::uint64_t peers_of(DeviceOrdinal owner) noexcept;  // as bits

  // The block around an address, if there is one, can be reached until it moves.
  void show(DevicePointer address) noexcept;
  // Where it begins, and how large it is, wherever it lies.
  [[nodiscard]] std::optional<Extent> extent_around(DevicePointer address) const noexcept;
  // Every block can be reached wherever it lies, now and later: there are those who name none.
  void keep_reachable() noexcept;

  // Makes `bytes` of HBM free for others: blocks may hold so much less until follow_the_wall(). Returns what
  // they gave up. Where all of them together cannot make that room, make_way() moves none for it, and
  // give_way() all that can leave.
  Bytes make_way(DeviceOrdinal device, Bytes bytes) noexcept;
  Bytes give_way(DeviceOrdinal device, Bytes bytes) noexcept;
  // What may be in HBM follows what the wall leaves: after native memory went, or did not come after all.
  void follow_the_wall(DeviceOrdinal device) noexcept;
  static Bytes follow_the_wall(DeviceBlocks& blocks);

  // A capture is about to begin: nothing moves until it has ended, and then what was freed meanwhile goes.
  void capture_begins() noexcept;
  void capture_ended() noexcept;
  void stream_ends(StreamHandle stream) noexcept;
  void device_reset(DeviceOrdinal device) noexcept;
  // A kernel was launched by a way on which nobody looks.
  void launched_unseen() noexcept;
  // Nothing moves any more; blocks stay usable.
  void stop_moving() noexcept;
  // The same, and what there was is reported.
  void process_ends() noexcept;
  void start_again_in_child() noexcept;

 private:
  struct Deferred {
    StreamName stream;
    DevicePointer address;
  };
  [[nodiscard]] DeviceBlocks* open(ContextHandle context);
  [[nodiscard]] std::unique_ptr<DeviceBlocks> make(ContextHandle context, DeviceOrdinal ordinal);
  DeviceBlocks* publish(std::unique_ptr<DeviceBlocks> blocks);
  [[nodiscard]] Result<Address> take(DeviceBlocks& blocks, Bytes size);
  void lease_ddr_for(DeviceBlocks& blocks, Bytes more, Bytes hbm);
  static void hold_no_more(DeviceBlocks& blocks, Bytes left);
  void lease_ddr(DeviceOrdinal device, Bytes needed);  // mutex_ held
  [[nodiscard]] CallResult end(DeviceBlocks& blocks, DevicePointer address);
  [[nodiscard]] bool defer_while_captured(const Deferred& free);
  [[nodiscard]] ExitFigures figures_of(const DeviceBlocks& blocks);
  static void hold(DeviceBlocks& blocks, Address at);
  void close(DeviceBlocks& blocks, std::string_view why) noexcept;

  std::array<std::atomic<DeviceBlocks*>, kMostDevices> made_{};  // never destroyed
  std::atomic<std::uint32_t> count_{0};
  std::atomic<DevicePointer> first_{0};
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<bool> only_device_{false};
  std::atomic<bool> ending_{false};
  std::mutex mutex_;  // all below, and opening a device
  std::array<bool, kMostDevices> failed_{};
  std::array<std::uint64_t, kMostDevices> peers_{};  // the devices that reach each one's memory, as bits
  std::shared_ptr<HostLease> lease_;                 // of all devices
  bool paused_ = false;                              // something is captured
  std::vector<Deferred> deferred_;
  struct Fixed {
    DevicePointer address;
    FixedReason reason;
    Bytes size;
  };
  std::vector<Fixed> fixed_;
  [[nodiscard]] std::vector<Fixed>::iterator fixed_at(DevicePointer address);  // mutex_ held
};

// The one of this process; never destroyed.
[[nodiscard]] StableBlocks& stable_blocks() noexcept;

// Whoever moves bytes between processes shows its buffers to others by ways of its own.
[[nodiscard]] bool allocates_for_others(const void* caller) noexcept;

}  // namespace terrace::hooks::cuda
