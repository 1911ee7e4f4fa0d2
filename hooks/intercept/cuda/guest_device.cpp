#include "hooks/intercept/cuda/guest_device.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "hooks/intercept/recorder.hpp"
#include "hooks/intercept/wall.hpp"
#include "runtime/metrics.hpp"

namespace terrace::hooks::cuda {
namespace {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

DevicePointer pointer_of(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

Result<std::unique_ptr<GuestDevice>> GuestDevice::open(const DriverCalls& driver, Place place) {
  std::unique_ptr<GuestDevice> device(new GuestDevice(driver, place));
  if (Status described = device->describe(); !described) return described.error();
  return device;
}

Status GuestDevice::describe() {
  info_.id = {place_.ordinal};
  info_.kind = "cuda";
  info_.can.remap = true;
  info_.can.host_physical = true;  // whether a node serves it shows when asked
  kind_.type = kPinnedMemory;
  kind_.location = {LocationType::kDevice, place_.ordinal};
  kind_.requested_handle_types = place_.events == Events::kTimed ? kFileDescriptor : 0;
  access_.push_back({kind_.location, kReadWrite});
  std::size_t total = 0, granularity = 0;
  if (Status asked = check("cuDeviceTotalMem", driver_.device_total(&total, place_.ordinal)); !asked)
    return asked;
  Status asked = check("cuMemGetAllocationGranularity",
                       in_context([&] { return driver_.granularity(&granularity, &kind_, 0); }));
  if (!asked) return asked;
  info_.granularity = Bytes(granularity);
  info_.capacity = round_down(Bytes(total), info_.granularity);
  return {};
}

int GuestDevice::nearest_node() const {
  char pci[32] = "";
  if (driver_.device_pci(pci, sizeof pci - 1, place_.ordinal) != kSuccess) return 0;
  for (char& c : pci) c = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
  const std::string name = "/sys/bus/pci/devices/" + std::string(pci) + "/numa_node";
  const int file = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
  char text[16] = "";
  if (file >= 0) {
    [[maybe_unused]] const ssize_t bytes = ::read(file, text, sizeof text - 1);
    ::close(file);
  }
  return std::max(std::atoi(text), 0);
}

Status GuestDevice::check(const char* call, CallResult result, Bytes size) const {
  if (result == kSuccess) return {};
  // Lost is only what has left a mapping half done; after anything else what was begun is undone.
  const Errc code = result == kOutOfMemory ? Errc::kOutOfMemory : Errc::kIo;
  return Error{.code = code,
               .text = std::string(call) + " on device " + std::to_string(place_.ordinal) + " answered " +
                       std::to_string(result),
               .bytes = size};
}

Error GuestDevice::not_supported(const char* what) const {
  return {.code = Errc::kNotSupported, .text = std::string("the pool inside a guest has no ") + what};
}

// ---------------------------------------------------------------- streams

Stream GuestDevice::adopt(StreamHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto [known, is_new] = stream_ids_.try_emplace(handle, last_stream_ + 1);
  if (is_new) streams_[++last_stream_] = handle;
  return {known->second};
}

bool GuestDevice::knows(StreamHandle handle) const {
  const std::lock_guard lock(mutex_);
  return stream_ids_.count(handle) != 0;
}

void GuestDevice::end(StreamHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto known = stream_ids_.find(handle);
  if (known == stream_ids_.end()) return;
  streams_.erase(known->second);
  stream_ids_.erase(known);
  count_stream_end();
}

StreamHandle GuestDevice::handle_of(Stream stream) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream.id);
  return found == streams_.end() ? nullptr : found->second;
}

bool GuestDevice::alive(Stream stream) const { return handle_of(stream) != nullptr; }

Status GuestDevice::synchronize(Stream stream) {
  const StreamHandle handle = handle_of(stream);
  if (handle == nullptr) return {};
  return check("cuStreamSynchronize", in_context([&] { return driver_.stream_synchronize(handle); }));
}

// ---------------------------------------------------------------- events

EventHandle GuestDevice::handle_of(Event event) const {
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(event.id);
  TERRACE_CHECK(found != events_.end(), "an event is used between create_event and destroy_event");
  return found->second;
}

Result<Event> GuestDevice::create_event() {
  EventHandle handle = nullptr;
  const unsigned flags = place_.events == Events::kTimed ? 0 : kNoTiming;
  if (Status made = check("cuEventCreate", in_context([&] { return driver_.event_create(&handle, flags); }));
      !made)
    return made.error();
  const std::lock_guard lock(mutex_);
  events_[++last_event_] = handle;
  return Event{last_event_};
}

void GuestDevice::destroy_event(Event event) {
  const EventHandle handle = handle_of(event);
  (void)in_context([&] { return driver_.event_destroy(handle); });
  const std::lock_guard lock(mutex_);
  events_.erase(event.id);
}

Status GuestDevice::record(Stream stream, Event event) {
  const StreamHandle handle = handle_of(stream);
  if (handle == nullptr) return Error{.code = Errc::kInvalidArgument, .text = "the stream has ended"};
  return check("cuEventRecord", in_context([&] { return driver_.event_record(handle_of(event), handle); }));
}

Status GuestDevice::wait(Stream stream, Event event) {
  const StreamHandle handle = handle_of(stream);
  if (handle == nullptr) return Error{.code = Errc::kInvalidArgument, .text = "the stream has ended"};
  return check("cuStreamWaitEvent",
               in_context([&] { return driver_.stream_wait(handle, handle_of(event), 0); }));
}

Status GuestDevice::synchronize(Event event) {
  return check("cuEventSynchronize", in_context([&] { return driver_.event_synchronize(handle_of(event)); }));
}

// A lost device answers everything with its error and completes nothing more: whoever polls must go on, to
// the call that says so. That is asked twice, for one error alone says nothing of the event.
bool GuestDevice::completed(Event event) const {
  const EventHandle handle = handle_of(event);
  for (int times = 0; times < 2; ++times) {
    const CallResult answer = in_context([&] { return driver_.event_query(handle); });
    if (answer == kSuccess) return true;
    if (answer == kNotReady || refused_in_capture(answer)) return false;
  }
  return true;
}

// ---------------------------------------------------------------- memory

Result<Address> GuestDevice::reserve(Bytes size) {
  DevicePointer at = 0;
  if (Status reserved = check("cuMemAddressReserve",
                              in_context([&] { return driver_.reserve(&at, size.count(), 0, 0, 0); }), size);
      !reserved)
    return reserved.error();
  base_.store(at, std::memory_order_relaxed);
  bytes_.store(size.count(), std::memory_order_release);
  return reinterpret_cast<Address>(at);
}

void GuestDevice::release(Address address, Bytes size) {
  bytes_.store(0, std::memory_order_release);
  (void)in_context([&] { return driver_.release_range(pointer_of(address), size.count()); });
}

bool GuestDevice::charge(Bytes size) {
  const std::lock_guard lock(charge_mutex_);
  const bool fits = wall().charge(place_.ordinal, size, Wall::Reclaim::kNot);
  if (fits) charged_ += size;
  if (!fits) refused_.store(true, std::memory_order_relaxed);
  return fits;
}

void GuestDevice::refund(Bytes size) {
  const std::lock_guard lock(charge_mutex_);
  wall().refund(place_.ordinal, size);
  charged_ -= size;
}

Result<Physical> GuestDevice::create_physical(Bytes size) {
  if (!charge(size)) return Error{.code = Errc::kOutOfMemory, .text = "the lease has no room", .bytes = size};
  PhysicalHandle handle = 0;
  AllocationProperties kind = kind_;
  CallResult result = in_context([&] { return driver_.create(&handle, size.count(), &kind, 0); });
  if (result != kSuccess && result != kOutOfMemory && kind.requested_handle_types != 0) {
    kind.requested_handle_types = 0;  // where nothing can be shown to others
    result = in_context([&] { return driver_.create(&handle, size.count(), &kind, 0); });
  }
  if (Status created = check("cuMemCreate", result, size); !created) {
    refund(size);
    if (result == kOutOfMemory) refused_.store(true, std::memory_order_relaxed);
    if (result != kOutOfMemory) metrics().add<Metric::kFaults>(FaultPoint::kDeviceCreatePhysical, 1);
    return created.error();
  }
  recorder().grew(TierId::kHbm, size);
  const std::lock_guard lock(mutex_);
  physical_[++last_physical_] = {handle, size, std::nullopt};
  return Physical{last_physical_};
}

Result<Physical> GuestDevice::create_host_physical(Bytes size, int numa_node) {
  AllocationProperties kind{};
  kind.type = kPinnedMemory;
  kind.location = {LocationType::kHostNuma, numa_node};
  PhysicalHandle handle = 0;
  const CallResult result = in_context([&] { return driver_.create(&handle, size.count(), &kind, 0); });
  if (Status created = check("cuMemCreate of host memory", result, size); !created) return created.error();
  recorder().grew(TierId::kDdr, size);
  const std::lock_guard lock(mutex_);
  physical_[++last_physical_] = {handle, size, numa_node};
  return Physical{last_physical_};
}

void GuestDevice::destroy_physical(Physical physical) {
  PhysicalState state{};
  {
    const std::lock_guard lock(mutex_);
    const auto found = physical_.find(physical.id);
    TERRACE_CHECK(found != physical_.end(), "physical memory is destroyed once");
    state = found->second;
    physical_.erase(found);
  }
  (void)in_context([&] { return driver_.destroy(state.handle); });
  if (!state.host_node) refund(state.size);
  recorder().shrank(state.host_node ? TierId::kDdr : TierId::kHbm, state.size);
}

GuestDevice::PhysicalState GuestDevice::state_of(Physical physical) const {
  const std::lock_guard lock(mutex_);
  const auto found = physical_.find(physical.id);
  TERRACE_CHECK(found != physical_.end(), "physical memory is mapped between its creation and its end");
  return found->second;
}
PhysicalHandle GuestDevice::handle_of(Physical physical) const { return state_of(physical).handle; }

Status GuestDevice::map(Address at, Physical physical, Bytes size) {
  const PhysicalPiece piece{physical, size};
  return map_all(at, {&piece, 1});
}

Status GuestDevice::map_all(Address at, std::span<const PhysicalPiece> pieces) {
  Bytes done;
  Status status;
  std::optional<int> host_node;
  std::size_t mapped = 0;
  for (; mapped < pieces.size() && status.ok(); ++mapped) {
    const PhysicalPiece& piece = pieces[mapped];
    const PhysicalState state = state_of(piece.physical);
    host_node = state.host_node;
    status =
        check("cuMemMap", in_context([&] {
                return driver_.map(pointer_of(at) + done.count(), piece.size.count(), 0, state.handle, 0);
              }),
              piece.size);
    if (!status) break;
    done += piece.size;
  }
  enter(at, pieces.first(mapped));
  if (status) status = open_access(at, done, host_node);
  if (status) return status;
  metrics().add<Metric::kFaults>(FaultPoint::kDeviceMap, 1);
  if (Status undone = undo(at, pieces.first(mapped)); !undone) return undone;
  return status;
}

// Before it is opened: who may reach this device from now on is found there, or this is found by grant().
void GuestDevice::enter(Address at, std::span<const PhysicalPiece> pieces) {
  const std::lock_guard lock(mutex_);
  for (const PhysicalPiece& piece : pieces) {
    mappings_[at] = piece.size;
    at += piece.size.count();
  }
}

Status GuestDevice::undo(Address at, std::span<const PhysicalPiece> pieces) {
  for (const PhysicalPiece& piece : pieces) {
    {
      const std::lock_guard lock(mutex_);
      mappings_.erase(at);
    }
    if (in_context([&] { return driver_.unmap(pointer_of(at), piece.size.count()); }) != kSuccess) {
      metrics().add<Metric::kFaults>(FaultPoint::kDeviceUnmap, 1);
      return Error{.code = Errc::kDeviceLost, .text = "half of a mapping stays", .bytes = piece.size};
    }
    at += piece.size.count();
  }
  return {};
}

Status GuestDevice::open_access(Address at, Bytes size, std::optional<int> host_node) {
  std::vector<AccessDescription> who;
  {
    const std::lock_guard lock(mutex_);
    who = access_;
  }
  if (host_node) who.push_back({{LocationType::kHostNuma, *host_node}, kReadWrite});
  return check("cuMemSetAccess", in_context([&] {
                 return driver_.set_access(pointer_of(at), size.count(), who.data(), who.size());
               }),
               size);
}

Status GuestDevice::unmap(Address at, Bytes size) {
  Status done =
      check("cuMemUnmap", in_context([&] { return driver_.unmap(pointer_of(at), size.count()); }), size);
  if (!done) {
    metrics().add<Metric::kFaults>(FaultPoint::kDeviceUnmap, 1);
    return done;
  }
  const std::lock_guard lock(mutex_);
  mappings_.erase(mappings_.lower_bound(at), mappings_.lower_bound(at + size.count()));
  return {};
}

CallResult GuestDevice::grant(DeviceOrdinal other) {
  const AccessDescription reader{{LocationType::kDevice, other}, kReadWrite};
  std::map<Address, Bytes> mapped;
  {
    const std::lock_guard lock(mutex_);
    for (const AccessDescription& known : access_) {
      if (known.location.id == other) return kSuccess;
    }
    // What is mapped from now on is open to it; what is mapped already, after the calls below.
    access_.push_back(reader);
    mapped = mappings_;
  }
  for (const auto& [at, size] : mapped) {
    const CallResult result = in_context(
        [&, &at = at, &size = size] { return driver_.set_access(pointer_of(at), size.count(), &reader, 1); });
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

Result<MemoryInfo> GuestDevice::memory() const {
  std::size_t free = 0, total = 0;
  const CallResult result = in_context([&] { return driver_.memory_info(&free, &total); });
  if (Status asked = check("cuMemGetInfo", result); !asked) return asked.error();
  return MemoryInfo{Bytes(free), Bytes(total)};
}

Status GuestDevice::bind_thread() { return check("cuCtxSetCurrent", driver_.context_set(place_.context)); }

}  // namespace terrace::hooks::cuda
