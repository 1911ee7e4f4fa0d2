// The one seam between Terrace and an accelerator: memory, streams, events, copies.
//
// Two real implementations, chosen at run time by open_device():
//   cuda      the CUDA driver, opened with dlopen (runtime/cuda/)
//   emulated  host memory as HBM with a capacity, worker threads as streams, a link with a set bandwidth
//             (runtime/emulated/)
// Code above asks for capabilities, never for a vendor.
//
// Every method may be called from any thread. Calls that take a Stream return at once; the work happens in
// the order in which calls on that stream were made. Errors are values; a failed call has changed nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "runtime/result.hpp"
#include "runtime/units.hpp"

namespace terrace {

// A device address, or the host address of pinned memory. Dereferenced by the host only where it owns the
// memory: pinned memory always, HBM on a device whose capabilities say host_addressable.
using Address = std::byte*;

struct DeviceId {
  int index = 0;
  auto operator<=>(const DeviceId&) const = default;
};
struct Stream {
  std::uint32_t id = 0;
  auto operator<=>(const Stream&) const = default;
};
struct Event {
  std::uint32_t id = 0;
  auto operator<=>(const Event&) const = default;
};
struct Physical {
  std::uint64_t id = 0;
  auto operator<=>(const Physical&) const = default;
};
// Physical memory and how large it was created.
struct PhysicalPiece {
  Physical physical;
  Bytes size;
};
[[nodiscard]] Bytes whole_size(std::span<const PhysicalPiece> pieces);

// kPeer: between the memories of two devices, in either direction.
enum class Direction : std::uint8_t { kH2D = 0, kD2H = 1, kD2D = 2, kPeer = 3 };
inline constexpr int kDirectionCount = 4;
[[nodiscard]] const char* name_of(Direction direction);  // "h2d", "d2h", "d2d", "peer"

enum class StreamPriority : std::uint8_t { kNormal, kHigh };

struct Capabilities {
  bool host_addressable = false;  // the host may read and write HBM at its Address
  bool host_kernels = false;      // launch_host() work computes: the CPU operators run here
  bool remap = false;             // physical memory under a reserved address can be exchanged
  bool host_physical = false;     // create_host_physical() exists; whether a node serves it shows when asked
};

// One piece of a copy. The ranges do not overlap, and no piece of a batch reads what another writes.
struct Transfer {
  Address to;
  const std::byte* from;
  Bytes size;
};

struct DeviceInfo {
  DeviceId id;
  std::string kind;   // "cuda", "emulated"
  std::string name;   // "NVIDIA H200", "emulated"
  std::string pci;    // "0000:1b:00.0", or empty
  Bytes capacity;     // HBM bytes this process could ever create
  Bytes granularity;  // of create_physical, map and unmap
  Capabilities can;
  double h2d_bytes_per_second = 0;  // of the link, each direction alone; 0: not known, measure it
  double d2h_bytes_per_second = 0;
};

struct MemoryInfo {
  Bytes free;
  Bytes total;
};

struct RingExchange;  // runtime/ring_exchange.hpp
struct Fp8Blocks;     // runtime/fp8_blocks.hpp
class LinkTime;       // runtime/link_time.hpp

class Device {
 public:
  Device();
  virtual ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  [[nodiscard]] virtual const DeviceInfo& info() const = 0;

  // --- Physical memory at reserved addresses. Sizes are multiples of info().granularity. ---
  [[nodiscard]] virtual Result<Address> reserve(Bytes size) = 0;  // address space, no memory
  virtual void release(Address address, Bytes size) = 0;          // all of it unmapped before
  [[nodiscard]] virtual Result<Physical> create_physical(
      Bytes size) = 0;  // Errors: kOutOfMemory, kDeviceLost
  // Pinned memory of the host's NUMA node `numa_node`, to be mapped as device memory is; the device and the
  // host both reach it there. Errors: kNotSupported (not on this device, or not on this node), kOutOfMemory.
  [[nodiscard]] virtual Result<Physical> create_host_physical(Bytes size, int numa_node) = 0;
  virtual void destroy_physical(Physical physical) = 0;  // unmapped before
  [[nodiscard]] virtual Status map(Address at, Physical physical,
                                   Bytes size) = 0;  // readable and writable on return
  // Maps pieces of device memory next to each other from `at`: all of them or none. Access is granted once
  // for all, which costs a GPU's driver a fifth of doing it piece by piece.
  [[nodiscard]] virtual Status map_all(Address at, std::span<const PhysicalPiece> pieces) = 0;
  [[nodiscard]] virtual Status unmap(Address at, Bytes size) = 0;  // the caller knows that no work uses it
  // Lets `peer` read and write whatever is mapped on this device, now and later. Idempotent; the peer
  // outlives this device's mappings. Errors: kNotSupported (no path between the two), and then nothing
  // changed.
  [[nodiscard]] virtual Status grant_access_to(const Device& peer) = 0;
  [[nodiscard]] virtual Result<MemoryInfo> memory() const = 0;

  // --- Host memory the copy engines can reach at full speed. The range stays the caller's. ---
  // A copy may cross from one pinned range to the next where they meet at a multiple of kPinStep
  // (runtime/pin_step.hpp).
  [[nodiscard]] virtual Status pin(Address host, Bytes size) = 0;
  virtual void unpin(Address host, Bytes size) = 0;

  // --- Streams and events ---
  [[nodiscard]] virtual Result<Stream> create_stream(StreamPriority priority) = 0;
  virtual void destroy_stream(Stream stream) = 0;  // waits for its work
  // Names a stream of a framework in this process: `native` is its CUstream, and null the default stream.
  // destroy_stream() forgets the name, without waiting; the stream outlives it. Errors: kNotSupported (here
  // streams have no native form).
  [[nodiscard]] virtual Result<Stream> adopt_stream(void* native);
  // Between create_stream and destroy_stream: whether other calls may name it. What was queued on a stream
  // that is no longer alive has finished.
  [[nodiscard]] virtual bool alive(Stream stream) const = 0;
  // How many streams have ended so far: while it stands, what was alive still is. Two instructions.
  [[nodiscard]] std::uint64_t streams_ended() const { return streams_ended_.load(std::memory_order_relaxed); }
  [[nodiscard]] virtual Status synchronize(
      Stream stream) = 0;  // the host waits; reports an earlier failed operation
  [[nodiscard]] virtual Result<Event> create_event() = 0;  // counts as completed until first recorded
  virtual void destroy_event(Event event) = 0;
  // Errors: kInvalidArgument (the stream has ended, perhaps just now), what the driver said.
  [[nodiscard]] virtual Status record(Stream stream, Event event) = 0;
  [[nodiscard]] virtual Status wait(Stream stream,
                                    Event event) = 0;         // later work on stream waits; the host does not
  [[nodiscard]] virtual Status synchronize(Event event) = 0;  // the host waits
  [[nodiscard]] virtual bool completed(Event event) const = 0;
  // Seconds from `from` to `to`, both recorded and completed; negative where `to` came first.
  [[nodiscard]] virtual Result<double> seconds_between(Event from, Event to) const = 0;

  // --- Work ---
  // On error part of it may be queued: synchronize the stream before the memory is reused.
  [[nodiscard]] virtual Status copy(Stream stream, Direction direction, Address to, const std::byte* from,
                                    Bytes size) = 0;
  // The pieces in one call, in no order among themselves: small pieces cost less than as copies of their own.
  // Errors as of copy().
  [[nodiscard]] virtual Status copy_batch(Stream stream, Direction direction,
                                          std::span<const Transfer> pieces) = 0;
  [[nodiscard]] virtual Status fill(Stream stream, Address to, std::uint8_t value, Bytes size) = 0;
  // Runs `work` on a host thread in stream order. On cuda it must not call the device; with host_kernels it
  // is the way operators are launched.
  [[nodiscard]] virtual Status launch_host(Stream stream, std::function<void()> work) = 0;
  // Writes a word of pinned host memory in stream order. Errors: kNotSupported, what the device said.
  [[nodiscard]] virtual Status write_word(Stream stream, std::atomic<std::uint32_t>& word,
                                          std::uint32_t value);
  // How many blocks of an exchange through ring buffers run here at once. Loads its code: asked before the
  // first exchange, which then allocates nothing. Errors: kNotSupported, kOutOfMemory, kDeviceLost.
  [[nodiscard]] virtual Result<std::uint32_t> exchange_blocks() = 0;
  // Queues one step of an exchange between devices, as runtime/ring_exchange.hpp says. The host waits for
  // nothing and learns no counts; what goes wrong later is in exchange.report. Errors: kInvalidArgument (more
  // blocks than run at once), kNotSupported.
  [[nodiscard]] virtual Status exchange(Stream stream, const RingExchange& exchange) = 0;
  // Numbers to 8-bit floats and back, as runtime/fp8_blocks.hpp says: the same bytes on every device. The
  // first call loads the code. Errors: kNotSupported, kOutOfMemory, what the device said of the launch.
  [[nodiscard]] virtual Status pack_fp8(Stream stream, const Fp8Blocks& blocks);
  [[nodiscard]] virtual Status unpack_fp8(Stream stream, const Fp8Blocks& blocks);
  // The CUstream behind a stream, for libraries that launch on it; null where there is none.
  [[nodiscard]] virtual void* native_stream(Stream stream) const = 0;
  // Makes the device's context current on the calling thread, for libraries that need one.
  [[nodiscard]] virtual Status bind_thread() = 0;

  // How this process shares the device's link with others.
  [[nodiscard]] LinkTime& link_time() const { return *link_time_; }
  // Of somebody else in the process, who has the seat; outlives the device. Before anything copies.
  void share_link_time(LinkTime& link) { link_time_ = &link; }

 protected:
  // A stream has ended: alive() says so already.
  void count_stream_end() { streams_ended_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> streams_ended_{0};
  const std::unique_ptr<LinkTime> own_link_time_;
  LinkTime* link_time_;
};

struct EmulatedOptions {
  Bytes capacity = Bytes(4ULL << 30);
  Bytes granularity = Bytes(64ULL << 10);
  double h2d_bytes_per_second =
      8e9;  // a copy takes bytes / this, each direction with a copy engine of its own
  double d2h_bytes_per_second = 8e9;
  int numa_nodes = 1;  // create_host_physical() serves the nodes 0 .. numa_nodes - 1
};
[[nodiscard]] Result<std::unique_ptr<Device>> open_emulated_device(const EmulatedOptions& options);
// Errors: kNotSupported (built without CUDA, or no driver on this machine), kNotFound (no such device).
[[nodiscard]] Result<std::unique_ptr<Device>> open_cuda_device(DeviceId id);
// Whether open_cuda_device could work: a driver and at least one device.
[[nodiscard]] bool cuda_available();
// "auto": cuda where available, else emulated; "cuda"; "emulated".
[[nodiscard]] Result<std::unique_ptr<Device>> open_device(std::string_view kind,
                                                          const EmulatedOptions& emulated);

// The emulated link rate at which moving a GEMM output costs, against recomputing it, what it costs at width
// 4096 on an H200: bytes/s = FLOP/s / 14,000 * 4096 / width.
[[nodiscard]] constexpr double emulated_link_rate(double gemm_flops_per_second, double hidden_width) {
  return gemm_flops_per_second / 14000.0 * 4096.0 / hidden_width;
}

}  // namespace terrace
