// A guest's GPU as a device of ours: memory, order and copies for the pool inside the process
// (stream_pools.hpp) and for blocks of stable addresses (stable_blocks.hpp).
//
// It calls the guest's own driver, in the guest's context, which it leaves as it was on every thread. Streams
// are the guest's, adopted, or our own, which wait for nobody's default stream. Device memory is charged to
// the wall before the driver is asked. It runs no work of the host: those calls answer kNotSupported.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "hooks/intercept/cuda/driver_calls.hpp"
#include "runtime/device.hpp"

namespace terrace::hooks::cuda {

class GuestDevice final : public Device {
 public:
  // kTimed: for what moves blocks, which others may also want to see.
  enum class Events : std::uint8_t { kPlain, kTimed };
  struct Place {
    ContextHandle context;
    DeviceOrdinal ordinal;
    Events events = Events::kPlain;
  };
  // Errors: kIo (the driver refuses to describe the device).
  [[nodiscard]] static Result<std::unique_ptr<GuestDevice>> open(const DriverCalls& driver, Place place);

  // The stream behind a guest's handle, from now until it ends.
  [[nodiscard]] Stream adopt(StreamHandle handle);
  [[nodiscard]] bool knows(StreamHandle handle) const;
  // It ends, its work having been waited for; the handle may name another one later.
  void end(StreamHandle handle);
  // Whether the address lies in what was reserved here. Wait-free.
  [[nodiscard]] bool holds(DevicePointer address) const {
    return address - base_.load(std::memory_order_relaxed) < bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] DevicePointer reserved_at() const { return base_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t reserved_bytes() const { return bytes_.load(std::memory_order_relaxed); }
  // Lets another device reach what is mapped now and later.
  [[nodiscard]] CallResult grant(DeviceOrdinal other);
  [[nodiscard]] const Place& place() const { return place_; }
  // Of the host's memory, as the kernel says; the first where it does not.
  [[nodiscard]] int nearest_node() const;
  // What the wall has been charged for this device's physical memory. `look` is called with it while no
  // charge changes.
  template <typename Look>
  void with_charged(const Look& look) const {
    const std::lock_guard lock(charge_mutex_);
    look(charged_);
  }
  // Memory was refused since this was asked last.
  [[nodiscard]] bool was_refused() {
    return refused_.load(std::memory_order_relaxed) && refused_.exchange(false);
  }
  // The driver's handle of physical memory; the caller knows that it lives.
  [[nodiscard]] PhysicalHandle handle_of(Physical physical) const;
  // One driver call in the device's context, whatever is captured elsewhere.
  template <typename Invoke>
  [[nodiscard]] CallResult in_context(const Invoke& invoke) const {
    const RelaxedCapture relaxed(driver_);
    const CurrentContext context(driver_, place_.context);
    return context.result() == kSuccess ? invoke() : context.result();
  }

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  [[nodiscard]] Result<Address> reserve(Bytes size) override;
  void release(Address address, Bytes size) override;
  [[nodiscard]] Result<Physical> create_physical(Bytes size) override;
  [[nodiscard]] Result<Physical> create_host_physical(Bytes size, int numa_node) override;
  void destroy_physical(Physical physical) override;
  [[nodiscard]] Status map(Address at, Physical physical, Bytes size) override;
  [[nodiscard]] Status map_all(Address at, std::span<const PhysicalPiece> pieces) override;
  [[nodiscard]] Status unmap(Address at, Bytes size) override;
  [[nodiscard]] Status grant_access_to(const Device& peer) override;
  [[nodiscard]] Result<MemoryInfo> memory() const override;
  [[nodiscard]] Status pin(Address host, Bytes size) override;
  void unpin(Address, Bytes) override {}
  [[nodiscard]] Result<Stream> create_stream(StreamPriority priority) override;
  void destroy_stream(Stream stream) override;
  [[nodiscard]] bool alive(Stream stream) const override;
  [[nodiscard]] Status synchronize(Stream stream) override;
  [[nodiscard]] Result<Event> create_event() override;
  void destroy_event(Event event) override;
  [[nodiscard]] Status record(Stream stream, Event event) override;
  [[nodiscard]] Status wait(Stream stream, Event event) override;
  [[nodiscard]] Status synchronize(Event event) override;
  [[nodiscard]] bool completed(Event event) const override;
  [[nodiscard]] Result<double> seconds_between(Event from, Event to) const override;
  [[nodiscard]] Status copy(Stream, Direction, Address, const std::byte*, Bytes size) override;
  [[nodiscard]] Status copy_batch(Stream, Direction, std::span<const Transfer>) override;
  [[nodiscard]] Status fill(Stream, Address, std::uint8_t, Bytes size) override;
  [[nodiscard]] Status launch_host(Stream, std::function<void()>) override;
  [[nodiscard]] Result<std::uint32_t> exchange_blocks() override;
  [[nodiscard]] Status exchange(Stream, const RingExchange&) override;
  [[nodiscard]] void* native_stream(Stream stream) const override { return handle_of(stream); }
  [[nodiscard]] Status bind_thread() override;

 private:
  GuestDevice(const DriverCalls& driver, Place place) : driver_(driver), place_(place) {}
  [[nodiscard]] Status describe();
  [[nodiscard]] bool charge(Bytes size);
  void refund(Bytes size);
  [[nodiscard]] Status check(const char* call, CallResult result, Bytes size = {}) const;
  [[nodiscard]] Error not_supported(const char* what) const;
  [[nodiscard]] StreamHandle handle_of(Stream stream) const;  // null: it has ended
  [[nodiscard]] EventHandle handle_of(Event event) const;
  void enter(Address at, std::span<const PhysicalPiece> pieces);
  Status undo(Address at, std::span<const PhysicalPiece> pieces);
  [[nodiscard]] Status open_access(Address at, Bytes size, std::optional<int> host_node);

  const DriverCalls& driver_;
  const Place place_;
  DeviceInfo info_;
  AllocationProperties kind_{};
  std::atomic<DevicePointer> base_{0};
  std::atomic<std::uint64_t> bytes_{0};

  mutable std::mutex charge_mutex_;  // the next
  Bytes charged_;
  std::atomic<bool> refused_{false};

  struct PhysicalState {
    PhysicalHandle handle;
    Bytes size;
    std::optional<int> host_node;  // of the host's memory there
  };
  [[nodiscard]] PhysicalState state_of(Physical physical) const;
  mutable std::mutex mutex_;  // all below
  std::vector<AccessDescription> access_;
  std::map<Address, Bytes> mappings_;
  std::map<std::uint64_t, PhysicalState> physical_;
  std::map<StreamHandle, std::uint32_t> stream_ids_;
  std::map<std::uint32_t, StreamHandle> streams_;
  std::map<std::uint32_t, EventHandle> events_;
  std::uint64_t last_physical_ = 0;
  std::uint32_t last_stream_ = 0, last_event_ = 0;
};

}  // namespace terrace::hooks::cuda
