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

DeviceInfo describe(const EmulatedOptions& options) {
  return {.id = DeviceId{},
          .kind = "emulated",
          .name = "emulated",
          .pci = {},
          .capacity = options.capacity,
          .granularity = options.granularity,
          .can = {.host_addressable = true, .host_kernels = true, .remap = true},
          .h2d_bytes_per_second = options.h2d_bytes_per_second,
          .d2h_bytes_per_second = options.d2h_bytes_per_second};
}

Error invalid(std::string text, Bytes size = {}) {
  return {.code = Errc::kInvalidArgument, .text = "emulated device: " + std::move(text), .bytes = size};
}

// Address space that faults when touched.
constexpr int kGap = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

Bytes sum_of(const std::map<Address, Bytes>& ranges) {
  Bytes sum;
  for (const auto& [address, size] : ranges) sum += size;
  return sum;
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
  EmulatedOptions whole = options;
  whole.capacity = round_down(options.capacity, options.granularity);
  auto memory = PhysicalMemory::create(whole.capacity);
  if (!memory.ok()) return std::move(memory).error();
  return std::unique_ptr<EmulatedDevice>(new EmulatedDevice(whole, std::move(memory).value()));
}

Result<std::unique_ptr<Device>> open_emulated_device(const EmulatedOptions& options) {
  auto device = EmulatedDevice::create(options);
  if (!device.ok()) return std::move(device).error();
  return std::unique_ptr<Device>(std::move(device).value());
}

EmulatedDevice::EmulatedDevice(const EmulatedOptions& options, std::unique_ptr<PhysicalMemory> memory)
    : info_(describe(options)),
      memory_(std::move(memory)),
      h2d_(options.h2d_bytes_per_second),
      d2h_(options.d2h_bytes_per_second) {}

EmulatedDevice::~EmulatedDevice() {
  // Before anything it uses goes away; a failure has nobody left to be reported to.
  for (const StreamPtr& stream : streams_.all()) (void)stream->synchronize();
  for (const auto& [address, size] : reservations_) munmap(address, size.count());
}

Bytes EmulatedDevice::reserved_bytes() const {
  const std::lock_guard lock(memory_mutex_);
  return sum_of(reservations_);
}

Bytes EmulatedDevice::mapped_bytes() const {
  const std::lock_guard lock(memory_mutex_);
  Bytes sum;
  for (const auto& [address, mapping] : mappings_) sum += mapping.size;
  return sum;
}

Bytes EmulatedDevice::pinned_bytes() const {
  const std::lock_guard lock(memory_mutex_);
  return sum_of(pinned_);
}

Status EmulatedDevice::check_size(const char* call, Bytes size) const {
  if (size > 0_B && size.count() % info_.granularity.count() == 0) return {};
  return invalid(std::string(call) + " of " + format_bytes(size) + ": sizes are multiples of " +
                     format_bytes(info_.granularity),
                 size);
}

bool EmulatedDevice::reserved(Address at, Bytes size) const {
  auto range = reservations_.upper_bound(at);
  if (range == reservations_.begin()) return false;
  --range;
  return at + size.count() <= range->first + range->second.count();
}

bool EmulatedDevice::maps_whole(Address at, Bytes size) const {
  const Address end = at + size.count();
  Address next = at;
  for (auto mapping = mappings_.find(at); next < end; ++mapping) {
    if (mapping == mappings_.end() || mapping->first != next) return false;
    next += mapping->second.size.count();
  }
  return next == end;
}

Result<Address> EmulatedDevice::reserve(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceReserve, size)) return *std::move(fault);
  if (Status checked = check_size("reserve", size); !checked.ok()) return checked.error();
  // Reserved with room to align the start to the granularity, as the driver does; the ends are given back.
  const std::uint64_t granularity = info_.granularity.count();
  const std::uint64_t padded = size.count() + granularity;
  void* space = padded < size.count() ? MAP_FAILED : mmap(nullptr, padded, PROT_NONE, kGap, -1, 0);
  if (space == MAP_FAILED) {
    return Error{
        .code = Errc::kOutOfMemory,
        .text = "emulated device: no address space of " + format_bytes(size) + ": " + std::strerror(errno),
        .bytes = size};
  }
  const auto start = reinterpret_cast<std::uintptr_t>(space);
  const std::uintptr_t aligned = (start + granularity - 1) & ~(granularity - 1);
  const std::uint64_t before = aligned - start;
  if (before > 0) munmap(space, before);
  const auto address = reinterpret_cast<Address>(aligned);
  munmap(address + size.count(), granularity - before);
  const std::lock_guard lock(memory_mutex_);
  reservations_.emplace(address, size);
  return address;
}

void EmulatedDevice::release(Address address, Bytes size) {
  const std::lock_guard lock(memory_mutex_);
  const auto range = reservations_.find(address);
  TERRACE_CHECK(range != reservations_.end() && range->second == size, "release takes what reserve gave");
  const auto mapping = mappings_.lower_bound(address);
  TERRACE_CHECK(mapping == mappings_.end() || mapping->first >= address + size.count(),
                "a range is unmapped before it is released");
  munmap(address, size.count());
  reservations_.erase(range);
}

Result<Physical> EmulatedDevice::create_physical(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreatePhysical, size)) return *std::move(fault);
  if (Status checked = check_size("create_physical", size); !checked.ok()) return checked.error();
  const Result<PhysicalMemory::Range> range = memory_->allocate(size);
  if (!range.ok()) return range.error();
  const std::lock_guard lock(memory_mutex_);
  const Physical physical{.id = ++last_physical_};
  physical_.emplace(physical, PhysicalState{.range = *range});
  return physical;
}

void EmulatedDevice::destroy_physical(Physical physical) {
  PhysicalMemory::Range range;
  {
    const std::lock_guard lock(memory_mutex_);
    const auto state = physical_.find(physical);
    TERRACE_CHECK(state != physical_.end(), "physical memory is destroyed once");
    TERRACE_CHECK(state->second.mappings == 0, "physical memory is unmapped before it is destroyed");
    range = state->second.range;
    physical_.erase(state);
  }
  memory_->free(range);
}

Status EmulatedDevice::map(Address at, Physical physical, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceMap, size)) return *std::move(fault);
  if (Status checked = check_size("map", size); !checked.ok()) return checked;
  const std::lock_guard lock(memory_mutex_);
  const auto state = physical_.find(physical);
  if (state == physical_.end()) return invalid("map: no such physical memory", size);
  const PhysicalMemory::Range range = state->second.range;
  if (range.size != size) {
    return invalid("map of " + format_bytes(size) + ": physical memory is mapped whole, here " +
                       format_bytes(range.size),
                   size);
  }
  if (!reserved(at, size) || reinterpret_cast<std::uintptr_t>(at) % info_.granularity.count() != 0) {
    return invalid("map: the range is not reserved, or starts between two granules", size);
  }
  const auto after = mappings_.lower_bound(at);
  const bool overlaps_next = after != mappings_.end() && after->first < at + size.count();
  const bool overlaps_last =
      after != mappings_.begin() && std::prev(after)->first + std::prev(after)->second.size.count() > at;
  if (overlaps_next || overlaps_last) return invalid("map: part of the range is mapped already", size);
  void* mapped = mmap(at, size.count(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory_->file(),
                      static_cast<off_t>(range.offset));
  if (mapped == MAP_FAILED) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "emulated device: map of " + format_bytes(size) + ": " + std::strerror(errno),
                 .bytes = size};
  }
  mappings_.emplace(at, Mapping{.size = size, .physical = physical});
  ++state->second.mappings;
  return {};
}

Status EmulatedDevice::unmap(Address at, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceUnmap, size)) return *std::move(fault);
  if (Status checked = check_size("unmap", size); !checked.ok()) return checked;
  const std::lock_guard lock(memory_mutex_);
  if (!maps_whole(at, size)) return invalid("unmap: the range is not one of whole mappings", size);
  if (mmap(at, size.count(), PROT_NONE, kGap | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "emulated device: unmap of " + format_bytes(size) + ": " + std::strerror(errno),
                 .bytes = size};
  }
  const auto first = mappings_.find(at);
  const auto last = mappings_.lower_bound(at + size.count());
  for (auto mapping = first; mapping != last; ++mapping) --physical_.at(mapping->second.physical).mappings;
  mappings_.erase(first, last);
  return {};
}

Result<MemoryInfo> EmulatedDevice::memory() const {
  return MemoryInfo{.free = memory_->capacity() - memory_->live(), .total = memory_->capacity()};
}

Status EmulatedDevice::pin(Address host, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDevicePin, size)) return *std::move(fault);
  if (host == nullptr || size == 0_B) return invalid("pin of nothing", size);
  const std::lock_guard lock(memory_mutex_);
  const auto after = pinned_.lower_bound(host);
  const bool overlaps_next = after != pinned_.end() && after->first < host + size.count();
  const bool overlaps_last =
      after != pinned_.begin() && std::prev(after)->first + std::prev(after)->second.count() > host;
  if (overlaps_next || overlaps_last) return invalid("pin: part of the range is pinned already", size);
  pinned_.emplace(host, size);
  return {};
}

void EmulatedDevice::unpin(Address host, Bytes size) {
  const std::lock_guard lock(memory_mutex_);
  const auto range = pinned_.find(host);
  TERRACE_CHECK(range != pinned_.end() && range->second == size, "unpin takes what was pinned");
  pinned_.erase(range);
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
  const StreamPtr queue = stream_of(stream);
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
      queue->run([to, from, size] { std::memcpy(to, from, size.count()); });
      break;
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

}  // namespace terrace
