// The device of a machine without a GPU: host memory as HBM, threads as streams, a link with a set bandwidth.
//
// It is no mock: bytes really move, the capacity binds, memory is remapped under reserved addresses, and an
// access through a gap faults. Work that throws fails its stream: what is queued behind it there, or waits
// for it, is dropped until synchronize(stream) has reported the error; nothing hangs. Every method asks its
// fault point first. What a GPU's driver would refuse is refused here, so that code proven here runs there: a
// Physical is mapped whole, unmap takes whole mappings, and a range is pinned once. Emulated devices of one
// process reach each other's memory once access has been granted, and by their addresses alone before: the
// gap is the one thing this device does not show.
//
// emulated_device.cpp opens it and has its streams and copies, emulated_memory.cpp its memory,
// ring_exchange.cpp its exchanges with other devices, fp8_blocks.cpp its packing of numbers.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "runtime/device.hpp"
#include "runtime/emulated/link.hpp"
#include "runtime/emulated/physical_memory.hpp"
#include "runtime/emulated/stream.hpp"
#include "runtime/slot_table.hpp"

namespace terrace {

class EmulatedDevice final : public Device {
 public:
  // Errors: kInvalidArgument (the text says which option), kOutOfMemory.
  [[nodiscard]] static Result<std::unique_ptr<EmulatedDevice>> create(const EmulatedOptions& options);
  ~EmulatedDevice() override;  // runs what is queued, stops every thread, gives all memory back

  // What is held now. All are zero again when a caller has given back all it took.
  [[nodiscard]] Bytes live_physical() const { return memory_->live(); }
  [[nodiscard]] Bytes live_host_physical() const { return host_memory_->live(); }
  [[nodiscard]] Bytes reserved_bytes() const;
  [[nodiscard]] Bytes mapped_bytes() const;
  [[nodiscard]] Bytes pinned_bytes() const;
  [[nodiscard]] int live_streams() const { return static_cast<int>(streams_.live()); }
  [[nodiscard]] int live_events() const { return static_cast<int>(events_.live()); }

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
  void unpin(Address host, Bytes size) override;
  [[nodiscard]] Result<Stream> create_stream(StreamPriority priority) override;
  void destroy_stream(Stream stream) override;
  [[nodiscard]] bool alive(Stream stream) const override { return streams_.find(stream.id).has_value(); }
  [[nodiscard]] Status synchronize(Stream stream) override;
  [[nodiscard]] Result<Event> create_event() override;
  void destroy_event(Event event) override;
  [[nodiscard]] Status record(Stream stream, Event event) override;
  [[nodiscard]] Status wait(Stream stream, Event event) override;
  [[nodiscard]] Status synchronize(Event event) override;
  [[nodiscard]] bool completed(Event event) const override;
  [[nodiscard]] Result<double> seconds_between(Event from, Event to) const override;
  [[nodiscard]] Status copy(Stream stream, Direction direction, Address to, const std::byte* from,
                            Bytes size) override;
  [[nodiscard]] Status copy_batch(Stream stream, Direction direction,
                                  std::span<const Transfer> pieces) override;
  [[nodiscard]] Status fill(Stream stream, Address to, std::uint8_t value, Bytes size) override;
  [[nodiscard]] Status launch_host(Stream stream, std::function<void()> work) override;
  [[nodiscard]] Status write_word(Stream stream, std::atomic<std::uint32_t>& word,
                                  std::uint32_t value) override;
  [[nodiscard]] Result<std::uint32_t> exchange_blocks() override;
  [[nodiscard]] Status exchange(Stream stream, const RingExchange& exchange) override;
  [[nodiscard]] Status pack_fp8(Stream stream, const Fp8Blocks& blocks) override;
  [[nodiscard]] Status unpack_fp8(Stream stream, const Fp8Blocks& blocks) override;
  [[nodiscard]] void* native_stream(Stream) const override { return nullptr; }
  [[nodiscard]] Status bind_thread() override { return {}; }

 private:
  struct PhysicalState {
    emulated::PhysicalMemory* memory = nullptr;  // the device's, or the host's
    emulated::PhysicalMemory::Range range;
    int mappings = 0;
  };
  struct Mapping {
    Bytes size;
    Physical physical;
  };
  // The newest recording of an event; null until the first.
  struct EventState {
    std::mutex mutex;
    std::shared_ptr<emulated::Recording> newest;
  };
  using StreamPtr = std::shared_ptr<emulated::EmulatedStream>;
  using EventPtr = std::shared_ptr<EventState>;

  EmulatedDevice(const EmulatedOptions& options, std::unique_ptr<emulated::PhysicalMemory> memory,
                 std::unique_ptr<emulated::PhysicalMemory> host_memory);
  [[nodiscard]] Result<Physical> create_from(emulated::PhysicalMemory& memory, Bytes size);
  [[nodiscard]] Status check_size(const char* call, Bytes size) const;
  // memory_mutex_ held, as the next ones.
  [[nodiscard]] Status map_locked(Address at, Physical physical, Bytes size);
  [[nodiscard]] Status unmap_locked(Address at, Bytes size);
  [[nodiscard]] bool reserved(Address at, Bytes size) const;
  [[nodiscard]] bool maps_whole(Address at, Bytes size) const;
  [[nodiscard]] StreamPtr stream_of(Stream stream) const;  // unknown: a programmer error, as the next one
  [[nodiscard]] EventPtr event_of(Event event) const;
  [[nodiscard]] std::shared_ptr<emulated::Recording> newest_recording(Event event) const;

  const DeviceInfo info_;
  const std::unique_ptr<emulated::PhysicalMemory> memory_;
  const std::unique_ptr<emulated::PhysicalMemory> host_memory_;
  const int numa_nodes_;
  emulated::Link h2d_;
  emulated::Link d2h_;

  mutable std::mutex memory_mutex_;  // the four maps
  std::map<Address, Bytes> reservations_;
  std::map<Address, Mapping> mappings_;
  std::map<Physical, PhysicalState> physical_;
  std::map<Address, Bytes> pinned_;
  std::uint64_t last_physical_ = 0;

  SlotTable<EventPtr> events_;
  SlotTable<StreamPtr> streams_;
};

}  // namespace terrace
