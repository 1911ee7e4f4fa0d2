#include "runtime/emulated/emulated_device.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "runtime/device_fault.hpp"

namespace terrace {

using emulated::EmulatedStream;
using emulated::PhysicalMemory;
using emulated::Recording;

namespace {

// Of the file for mapped host memory, whose pages are there when touched: budgets are its users' to keep.
constexpr Bytes kHostMemory = 4096_GiB;

DeviceInfo describe(const EmulatedOptions& options) {
  return {.id = DeviceId{},
          .kind = "emulated",
          .name = "emulated",
          .pci = {},
          .capacity = options.capacity,
          .granularity = options.granularity,
          .can = {.host_addressable = true, .host_kernels = true, .remap = true, .host_physical = true},
          .h2d_bytes_per_second = options.h2d_bytes_per_second,
          .d2h_bytes_per_second = options.d2h_bytes_per_second};
}

Error invalid(std::string text, Bytes size = {}) {
  return {.code = Errc::kInvalidArgument, .text = "emulated device: " + std::move(text), .bytes = size};
}

}  // namespace

Result<std::unique_ptr<EmulatedDevice>> EmulatedDevice::create(const EmulatedOptions& options) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t granularity = options.granularity.count();
  if (!std::has_single_bit(granularity) || granularity < page) {
    return invalid("granularity " + format_bytes(options.granularity) + " is no power of two of at least " +
                   format_bytes(Bytes(page)));
  }
  if (options.capacity < options.granularity) {
    return invalid("capacity " + format_bytes(options.capacity) + " is less than the granularity " +
                   format_bytes(options.granularity));
  }
  // Written so that NaN is refused too.
  if (!(options.h2d_bytes_per_second > 0) || !(options.d2h_bytes_per_second > 0)) {
    return invalid("the link's bytes per second must be more than zero in both directions");
  }
  if (options.numa_nodes < 1) return invalid("a machine has at least one NUMA node");
  EmulatedOptions whole = options;
  whole.capacity = round_down(options.capacity, options.granularity);
  auto memory = PhysicalMemory::create(whole.capacity);
  if (!memory.ok()) return std::move(memory).error();
  auto host_memory = PhysicalMemory::create(kHostMemory);
  if (!host_memory.ok()) return std::move(host_memory).error();
  return std::unique_ptr<EmulatedDevice>(
      new EmulatedDevice(whole, std::move(memory).value(), std::move(host_memory).value()));
}

Result<std::unique_ptr<Device>> open_emulated_device(const EmulatedOptions& options) {
  auto device = EmulatedDevice::create(options);
  if (!device.ok()) return std::move(device).error();
  return std::unique_ptr<Device>(std::move(device).value());
}

EmulatedDevice::EmulatedDevice(const EmulatedOptions& options, std::unique_ptr<PhysicalMemory> memory,
                               std::unique_ptr<PhysicalMemory> host_memory)
    : info_(describe(options)),
      memory_(std::move(memory)),
      host_memory_(std::move(host_memory)),
      numa_nodes_(options.numa_nodes),
      h2d_(options.h2d_bytes_per_second),
      d2h_(options.d2h_bytes_per_second) {}

EmulatedDevice::~EmulatedDevice() {
  // Before anything it uses goes away; a failure has nobody left to be reported to.
  for (const StreamPtr& stream : streams_.all()) (void)stream->synchronize();
  for (const auto& [address, size] : reservations_) munmap(address, size.count());
}

EmulatedDevice::StreamPtr EmulatedDevice::stream_of(Stream stream) const {
  std::optional<StreamPtr> found = streams_.find(stream.id);
  TERRACE_CHECK(found.has_value(), "a stream is used between create_stream and destroy_stream");
  return *std::move(found);
}

EmulatedDevice::EventPtr EmulatedDevice::event_of(Event event) const {
  std::optional<EventPtr> found = events_.find(event.id);
  TERRACE_CHECK(found.has_value(), "an event is used between create_event and destroy_event");
  return *std::move(found);
}

std::shared_ptr<Recording> EmulatedDevice::newest_recording(Event event) const {
  const EventPtr state = event_of(event);
  const std::lock_guard lock(state->mutex);
  return state->newest;
}

Result<Stream> EmulatedDevice::create_stream(StreamPriority /*threads have no priority here*/) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreateStream)) return *std::move(fault);
  try {
    return Stream{.id = streams_.insert(std::make_shared<EmulatedStream>())};
  } catch (const std::system_error& refused) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = std::string("emulated device: no thread for a stream: ") + refused.what()};
  }
}

void EmulatedDevice::destroy_stream(Stream stream) {
  // Waits while the stream still has its name: queued work may use it.
  (void)stream_of(stream)->synchronize();
  streams_.erase(stream.id);
  count_stream_end();
}

Status EmulatedDevice::synchronize(Stream stream) { return stream_of(stream)->synchronize(); }

Result<Event> EmulatedDevice::create_event() {
  if (auto fault = device_fault(FaultPoint::kDeviceCreateEvent)) return *std::move(fault);
  return Event{.id = events_.insert(std::make_shared<EventState>())};
}

void EmulatedDevice::destroy_event(Event event) {
  TERRACE_CHECK(events_.erase(event.id).has_value(), "an event is destroyed once");
}

Status EmulatedDevice::record(Stream stream, Event event) {
  if (auto fault = device_fault(FaultPoint::kDeviceRecord)) return *std::move(fault);
  const std::optional<StreamPtr> found = streams_.find(stream.id);
  if (!found) return invalid("record on a stream that has ended");
  const StreamPtr& queue = *found;
  const EventPtr state = event_of(event);
  auto recording = std::make_shared<Recording>();
  // Queued before anyone can wait for it, and in the order in which the event names its recordings.
  const std::lock_guard lock(state->mutex);
  queue->record(recording);
  state->newest = std::move(recording);
  return {};
}

Status EmulatedDevice::wait(Stream stream, Event event) {
  if (auto fault = device_fault(FaultPoint::kDeviceWait)) return *std::move(fault);
  const StreamPtr queue = stream_of(stream);
  if (std::shared_ptr<Recording> recording = newest_recording(event)) queue->wait(std::move(recording));
  return {};
}

Status EmulatedDevice::synchronize(Event event) {
  const std::shared_ptr<Recording> recording = newest_recording(event);
  if (recording == nullptr) return {};
  recording->wait();
  if (recording->failure()) return *recording->failure();
  return {};
}

bool EmulatedDevice::completed(Event event) const {
  const std::shared_ptr<Recording> recording = newest_recording(event);
  return recording == nullptr || recording->completed();
}

Result<double> EmulatedDevice::seconds_between(Event from, Event to) const {
  const std::shared_ptr<Recording> first = newest_recording(from);
  const std::shared_ptr<Recording> second = newest_recording(to);
  for (const auto& recording : {first, second}) {
    if (recording == nullptr || !recording->completed()) {
      return invalid("seconds_between: an event is not recorded, or not completed");
    }
  }
  return std::chrono::duration<double>(second->at() - first->at()).count();
}

Status EmulatedDevice::copy(Stream stream, Direction direction, Address to, const std::byte* from,
                            Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceCopy, size)) return *std::move(fault);
  const StreamPtr queue = stream_of(stream);
  if (size == 0_B) return {};
  switch (direction) {
    case Direction::kH2D:
      queue->transfer(
          [this, to, from, size](emulated::Time ready) { return h2d_.carry(to, from, size, ready); });
      break;
    case Direction::kD2H:
      queue->transfer(
          [this, to, from, size](emulated::Time ready) { return d2h_.carry(to, from, size, ready); });
      break;
    case Direction::kD2D:
    case Direction::kPeer:
      queue->run([to, from, size] { std::memcpy(to, from, size.count()); });
      break;
  }
  return {};
}

Status EmulatedDevice::copy_batch(Stream stream, Direction direction, std::span<const Transfer> pieces) {
  for (const Transfer& piece : pieces) {
    if (Status copied = copy(stream, direction, piece.to, piece.from, piece.size); !copied.ok())
      return copied;
  }
  return {};
}

Status EmulatedDevice::fill(Stream stream, Address to, std::uint8_t value, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceFill, size)) return *std::move(fault);
  const StreamPtr queue = stream_of(stream);
  if (size > 0_B) queue->run([to, value, size] { std::memset(to, value, size.count()); });
  return {};
}

Status EmulatedDevice::launch_host(Stream stream, std::function<void()> work) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  TERRACE_CHECK(work != nullptr, "launch_host takes work");
  stream_of(stream)->run(std::move(work));
  return {};
}

Status EmulatedDevice::write_word(Stream stream, std::atomic<std::uint32_t>& word, std::uint32_t value) {
  return launch_host(stream, [&word, value] { word.store(value, std::memory_order_release); });
}

}  // namespace terrace
