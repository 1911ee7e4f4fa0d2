// The device behind the CUDA driver: virtual memory management, streams, events and copies of one GPU, in its
// primary context, which the CUDA runtime and the libraries in the process use too.
#include <array>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/driver.hpp"
#include "runtime/device_fault.hpp"
#include "runtime/slot_table.hpp"

namespace terrace {

namespace cuda {

namespace {

CUdeviceptr pointer_of(const std::byte* address) { return reinterpret_cast<CUdeviceptr>(address); }

// The first failure of host work on a stream. Work may outlive the stream's handle: whoever comes last frees
// it.
class HostFailure {
 public:
  void set(std::string text) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = Error{.code = Errc::kIo, .text = std::move(text)};
  }
  [[nodiscard]] std::optional<Error> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(failure_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::optional<Error> failure_;
};

struct CudaStream {
  CUstream handle = nullptr;
  std::shared_ptr<HostFailure> host_failure;
};

struct HostWork {
  std::function<void()> work;
  std::shared_ptr<HostFailure> failure;
};

// Runs on a thread of the driver, through which no exception may pass.
void CUDA_CB run_host_work(void* data) {
  const std::unique_ptr<HostWork> host(static_cast<HostWork*>(data));
  try {
    host->work();
  } catch (const std::exception& thrown) {
    host->failure->set(std::string("work on a stream threw: ") + thrown.what());
  } catch (...) {
    host->failure->set("work on a stream threw what is no std::exception");
  }
}

}  // namespace

class CudaDevice final : public Device {
 public:
  [[nodiscard]] static Result<std::unique_ptr<CudaDevice>> open(const Driver& driver, DeviceId id);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  [[nodiscard]] Result<Address> reserve(Bytes size) override;
  void release(Address address, Bytes size) override;
  [[nodiscard]] Result<Physical> create_physical(Bytes size) override;
  void destroy_physical(Physical physical) override;
  [[nodiscard]] Status map(Address at, Physical physical, Bytes size) override;
  [[nodiscard]] Status unmap(Address at, Bytes size) override;
  [[nodiscard]] Result<MemoryInfo> memory() const override;
  [[nodiscard]] Status pin(Address host, Bytes size) override;
  void unpin(Address host, Bytes size) override;
  [[nodiscard]] Result<Stream> create_stream(StreamPriority priority) override;
  void destroy_stream(Stream stream) override;
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
  [[nodiscard]] Status fill(Stream stream, Address to, std::uint8_t value, Bytes size) override;
  [[nodiscard]] Status launch_host(Stream stream, std::function<void()> work) override;
  [[nodiscard]] void* native_stream(Stream stream) const override { return stream_of(stream).handle; }
  [[nodiscard]] Status bind_thread() override;

 private:
  struct PhysicalState {
    CUmemGenericAllocationHandle handle = 0;
    Bytes size;
  };
  struct PriorityRange {
    int normal = 0;
    int high = 0;
  };

  CudaDevice(const Driver& driver, CUdevice device, CUcontext context, DeviceId id);
  [[nodiscard]] Status describe();

  // Makes one driver call in the device's context and leaves the thread's own as it was: the thread may be a
  // guest's, at work on another device. Which context is current is the driver's to say: a note of our own
  // would be stale as soon as the CUDA runtime or a second device changed it.
  template <typename Invoke>
  [[nodiscard]] CUresult in_context(Invoke&& invoke) const {
    CUcontext before = nullptr;
    if (const CUresult asked = driver_.cuCtxGetCurrent(&before); asked != CUDA_SUCCESS) return asked;
    if (before == context_) return invoke();
    if (const CUresult bound = driver_.cuCtxSetCurrent(context_); bound != CUDA_SUCCESS) return bound;
    const CUresult result = invoke();
    driver_.cuCtxSetCurrent(before);
    return result;
  }
  template <typename Invoke>
  [[nodiscard]] Status call(const char* name, Bytes size, Invoke&& invoke) const {
    return check(driver_, in_context(std::forward<Invoke>(invoke)),
                 {.call = name, .size = size, .device = info_.id});
  }
  [[nodiscard]] Error invalid(std::string text, Bytes size) const;
  [[nodiscard]] Status check_size(const char* call, Bytes size) const;
  [[nodiscard]] CudaStream stream_of(Stream stream) const;  // unknown: a programmer error, as the next one
  [[nodiscard]] CUevent event_of(Event event) const;

  const Driver& driver_;
  const CUdevice device_;
  const CUcontext context_;
  DeviceInfo info_;
  CUmemAllocationProp memory_kind_{};
  // Who may touch what map() maps: this device, and each peer that is to be let in.
  std::vector<CUmemAccessDesc> access_;
  PriorityRange priorities_;

  std::mutex memory_mutex_;  // the two maps
  std::map<Physical, PhysicalState> physical_;
  std::map<Address, Bytes> pinned_;
  std::uint64_t last_physical_ = 0;

  SlotTable<CudaStream> streams_;
  SlotTable<CUevent> events_;
};

Result<std::unique_ptr<CudaDevice>> CudaDevice::open(const Driver& driver, DeviceId id) {
  CUdevice device = 0;
  const Status found = check(driver, driver.cuDeviceGet(&device, id.index), {"cuDeviceGet", {}, id});
  if (!found.ok()) {
    Error error = found.error();
    // The driver calls an ordinal past the last an invalid argument or an invalid device, by version.
    error.code = Errc::kNotFound;
    return error;
  }
  CUcontext context = nullptr;
  const Status retained =
      check(driver, driver.cuDevicePrimaryCtxRetain(&context, device), {"cuDevicePrimaryCtxRetain", {}, id});
  if (!retained.ok()) return retained.error();
  std::unique_ptr<CudaDevice> opened(new CudaDevice(driver, device, context, id));
  if (Status described = opened->describe(); !described.ok()) return described.error();
  return opened;
}

CudaDevice::CudaDevice(const Driver& driver, CUdevice device, CUcontext context, DeviceId id)
    : driver_(driver), device_(device), context_(context) {
  info_.id = id;
  info_.kind = "cuda";
  memory_kind_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory_kind_.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  access_.push_back({.location = memory_kind_.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
}

Status CudaDevice::describe() {
  int virtual_memory = 0;
  Status asked = call("cuDeviceGetAttribute", {}, [&] {
    return driver_.cuDeviceGetAttribute(&virtual_memory,
                                        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_);
  });
  if (!asked.ok()) return asked;
  if (virtual_memory == 0) {
    return Error{.code = Errc::kNotSupported,
                 .text = "cuda device " + std::to_string(info_.id.index) +
                         " has no virtual memory management; use the emulated device"};
  }
  info_.can.remap = true;

  std::array<char, 256> name{};
  asked = call("cuDeviceGetName", {}, [&] {
    return driver_.cuDeviceGetName(name.data(), static_cast<int>(name.size()) - 1, device_);
  });
  if (!asked.ok()) return asked;
  info_.name = name.data();

  std::array<char, 32> pci{};
  asked = call("cuDeviceGetPCIBusId", {}, [&] {
    return driver_.cuDeviceGetPCIBusId(pci.data(), static_cast<int>(pci.size()) - 1, device_);
  });
  if (!asked.ok()) return asked;
  info_.pci = pci.data();
  for (char& c : info_.pci) {
    if (c >= 'A' && c <= 'F') c = static_cast<char>(c - 'A' + 'a');
  }

  std::size_t granularity = 0;
  asked = call("cuMemGetAllocationGranularity", {}, [&] {
    return driver_.cuMemGetAllocationGranularity(&granularity, &memory_kind_,
                                                 CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  });
  if (!asked.ok()) return asked;
  info_.granularity = Bytes(granularity);

  const Result<MemoryInfo> memory = this->memory();
  if (!memory.ok()) return memory.error();
  info_.capacity = round_down(memory->total, info_.granularity);

  return call("cuCtxGetStreamPriorityRange", {},
              [&] { return driver_.cuCtxGetStreamPriorityRange(&priorities_.normal, &priorities_.high); });
}

// Failures in what follows have nobody to go to, and nothing to do: a context that refuses them, lost or
// already torn down at the end of the process, holds none of this any more.
CudaDevice::~CudaDevice() {
  (void)in_context([&] {
    for (const CudaStream& stream : streams_.all()) {
      driver_.cuStreamSynchronize(stream.handle);
      driver_.cuStreamDestroy(stream.handle);
    }
    for (const CUevent event : events_.all()) driver_.cuEventDestroy(event);
    for (const auto& [host, size] : pinned_) driver_.cuMemHostUnregister(host);
    for (const auto& [id, physical] : physical_) driver_.cuMemRelease(physical.handle);
    return CUDA_SUCCESS;
  });
  driver_.cuDevicePrimaryCtxRelease(device_);
}

Status CudaDevice::bind_thread() {
  return check(driver_, driver_.cuCtxSetCurrent(context_), {"cuCtxSetCurrent", {}, info_.id});
}

Error CudaDevice::invalid(std::string text, Bytes size) const {
  return {.code = Errc::kInvalidArgument,
          .text = "cuda device " + std::to_string(info_.id.index) + ": " + std::move(text),
          .bytes = size};
}

Status CudaDevice::check_size(const char* call, Bytes size) const {
  if (size > 0_B && size.count() % info_.granularity.count() == 0) return {};
  return invalid(std::string(call) + " of " + format_bytes(size) + ": sizes are multiples of " +
                     format_bytes(info_.granularity),
                 size);
}

Result<Address> CudaDevice::reserve(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceReserve, size)) return *std::move(fault);
  if (Status checked = check_size("reserve", size); !checked.ok()) return checked.error();
  CUdeviceptr at = 0;
  const Status reserved = call("cuMemAddressReserve", size,
                               [&] { return driver_.cuMemAddressReserve(&at, size.count(), 0, 0, 0); });
  if (!reserved.ok()) return reserved.error();
  return reinterpret_cast<Address>(at);
}

void CudaDevice::release(Address address, Bytes size) {
  const CUresult freed =
      in_context([&] { return driver_.cuMemAddressFree(pointer_of(address), size.count()); });
  TERRACE_CHECK(freed != CUDA_ERROR_INVALID_VALUE, "release takes what reserve gave, unmapped before");
}

Result<Physical> CudaDevice::create_physical(Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreatePhysical, size)) return *std::move(fault);
  if (Status checked = check_size("create_physical", size); !checked.ok()) return checked.error();
  PhysicalState state{.handle = 0, .size = size};
  const Status created = call("cuMemCreate", size, [&] {
    return driver_.cuMemCreate(&state.handle, size.count(), &memory_kind_, 0);
  });
  if (!created.ok()) return created.error();
  const std::lock_guard lock(memory_mutex_);
  const Physical physical{.id = ++last_physical_};
  physical_.emplace(physical, state);
  return physical;
}

void CudaDevice::destroy_physical(Physical physical) {
  PhysicalState state;
  {
    const std::lock_guard lock(memory_mutex_);
    const auto found = physical_.find(physical);
    TERRACE_CHECK(found != physical_.end(), "physical memory is destroyed once");
    state = found->second;
    physical_.erase(found);
  }
  (void)in_context([&] { return driver_.cuMemRelease(state.handle); });
}

Status CudaDevice::map(Address at, Physical physical, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceMap, size)) return *std::move(fault);
  if (Status checked = check_size("map", size); !checked.ok()) return checked;
  PhysicalState state;
  {
    const std::lock_guard lock(memory_mutex_);
    const auto found = physical_.find(physical);
    if (found == physical_.end()) return invalid("map: no such physical memory", size);
    state = found->second;
  }
  if (state.size != size) {
    return invalid("map of " + format_bytes(size) + ": physical memory is mapped whole, here " +
                       format_bytes(state.size),
                   size);
  }
  const CUdeviceptr pointer = pointer_of(at);
  Status mapped =
      call("cuMemMap", size, [&] { return driver_.cuMemMap(pointer, size.count(), 0, state.handle, 0); });
  if (!mapped.ok()) return mapped;
  Status granted = call("cuMemSetAccess", size, [&] {
    return driver_.cuMemSetAccess(pointer, size.count(), access_.data(), access_.size());
  });
  if (!granted.ok()) (void)in_context([&] { return driver_.cuMemUnmap(pointer, size.count()); });
  return granted;
}

Status CudaDevice::unmap(Address at, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceUnmap, size)) return *std::move(fault);
  if (Status checked = check_size("unmap", size); !checked.ok()) return checked;
  return call("cuMemUnmap", size, [&] { return driver_.cuMemUnmap(pointer_of(at), size.count()); });
}

Result<MemoryInfo> CudaDevice::memory() const {
  std::size_t free = 0;
  std::size_t total = 0;
  const Status asked = call("cuMemGetInfo", {}, [&] { return driver_.cuMemGetInfo(&free, &total); });
  if (!asked.ok()) return asked.error();
  return MemoryInfo{.free = Bytes(free), .total = Bytes(total)};
}

Status CudaDevice::pin(Address host, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDevicePin, size)) return *std::move(fault);
  if (host == nullptr || size == 0_B) return invalid("pin of nothing", size);
  // Portable: pinned for every context of the process, since one buffer may serve several devices.
  Status pinned = call("cuMemHostRegister", size, [&] {
    return driver_.cuMemHostRegister(host, size.count(), CU_MEMHOSTREGISTER_PORTABLE);
  });
  if (!pinned.ok()) return pinned;
  const std::lock_guard lock(memory_mutex_);
  pinned_.emplace(host, size);
  return {};
}

void CudaDevice::unpin(Address host, Bytes size) {
  {
    const std::lock_guard lock(memory_mutex_);
    const auto range = pinned_.find(host);
    TERRACE_CHECK(range != pinned_.end() && range->second == size, "unpin takes what was pinned");
    pinned_.erase(range);
  }
  (void)in_context([&] { return driver_.cuMemHostUnregister(host); });
}

CudaStream CudaDevice::stream_of(Stream stream) const {
  std::optional<CudaStream> found = streams_.find(stream.id);
  TERRACE_CHECK(found.has_value(), "a stream is used between create_stream and destroy_stream");
  return *std::move(found);
}

CUevent CudaDevice::event_of(Event event) const {
  const std::optional<CUevent> found = events_.find(event.id);
  TERRACE_CHECK(found.has_value(), "an event is used between create_event and destroy_event");
  return *found;
}

Result<Stream> CudaDevice::create_stream(StreamPriority priority) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreateStream)) return *std::move(fault);
  CudaStream stream{.handle = nullptr, .host_failure = std::make_shared<HostFailure>()};
  const int level = priority == StreamPriority::kHigh ? priorities_.high : priorities_.normal;
  const Status created = call("cuStreamCreateWithPriority", {}, [&] {
    return driver_.cuStreamCreateWithPriority(&stream.handle, CU_STREAM_NON_BLOCKING, level);
  });
  if (!created.ok()) return created.error();
  return Stream{.id = streams_.insert(std::move(stream))};
}

void CudaDevice::destroy_stream(Stream stream) {
  const std::optional<CudaStream> taken = streams_.erase(stream.id);
  TERRACE_CHECK(taken.has_value(), "a stream is destroyed once");
  (void)in_context([&] {
    driver_.cuStreamSynchronize(taken->handle);
    return driver_.cuStreamDestroy(taken->handle);
  });
}

Status CudaDevice::synchronize(Stream stream) {
  const CudaStream queue = stream_of(stream);
  Status waited = call("cuStreamSynchronize", {}, [&] { return driver_.cuStreamSynchronize(queue.handle); });
  if (!waited.ok()) return waited;
  if (auto failure = queue.host_failure->take()) return *std::move(failure);
  return {};
}

Result<Event> CudaDevice::create_event() {
  if (auto fault = device_fault(FaultPoint::kDeviceCreateEvent)) return *std::move(fault);
  CUevent event = nullptr;
  const Status created =
      call("cuEventCreate", {}, [&] { return driver_.cuEventCreate(&event, CU_EVENT_DEFAULT); });
  if (!created.ok()) return created.error();
  return Event{.id = events_.insert(event)};
}

void CudaDevice::destroy_event(Event event) {
  const std::optional<CUevent> taken = events_.erase(event.id);
  TERRACE_CHECK(taken.has_value(), "an event is destroyed once");
  (void)in_context([&] { return driver_.cuEventDestroy(*taken); });
}

Status CudaDevice::record(Stream stream, Event event) {
  if (auto fault = device_fault(FaultPoint::kDeviceRecord)) return *std::move(fault);
  const CUstream queue = stream_of(stream).handle;
  const CUevent mark = event_of(event);
  return call("cuEventRecord", {}, [&] { return driver_.cuEventRecord(mark, queue); });
}

Status CudaDevice::wait(Stream stream, Event event) {
  if (auto fault = device_fault(FaultPoint::kDeviceWait)) return *std::move(fault);
  const CUstream queue = stream_of(stream).handle;
  const CUevent mark = event_of(event);
  return call("cuStreamWaitEvent", {}, [&] { return driver_.cuStreamWaitEvent(queue, mark, 0); });
}

Status CudaDevice::synchronize(Event event) {
  const CUevent mark = event_of(event);
  return call("cuEventSynchronize", {}, [&] { return driver_.cuEventSynchronize(mark); });
}

bool CudaDevice::completed(Event event) const {
  const CUevent mark = event_of(event);
  // A lost device completes nothing more: whoever polls must go on, to the call that says so.
  return in_context([&] { return driver_.cuEventQuery(mark); }) != CUDA_ERROR_NOT_READY;
}

Result<double> CudaDevice::seconds_between(Event from, Event to) const {
  const CUevent first = event_of(from);
  const CUevent second = event_of(to);
  float milliseconds = 0;
  const Status measured = call("cuEventElapsedTime", {},
                               [&] { return driver_.cuEventElapsedTime(&milliseconds, first, second); });
  if (measured.ok()) return static_cast<double>(milliseconds) * 1e-3;
  Error error = measured.error();
  if (error.code == Errc::kTimeout)
    error.code = Errc::kInvalidArgument;  // not completed: the caller's to know
  return error;
}

Status CudaDevice::copy(Stream stream, Direction direction, Address to, const std::byte* from, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceCopy, size)) return *std::move(fault);
  const CUstream queue = stream_of(stream).handle;
  if (size == 0_B) return {};
  switch (direction) {
    case Direction::kH2D:
      return call("cuMemcpyHtoDAsync", size,
                  [&] { return driver_.cuMemcpyHtoDAsync(pointer_of(to), from, size.count(), queue); });
    case Direction::kD2H:
      return call("cuMemcpyDtoHAsync", size,
                  [&] { return driver_.cuMemcpyDtoHAsync(to, pointer_of(from), size.count(), queue); });
    case Direction::kD2D:
      return call("cuMemcpyDtoDAsync", size, [&] {
        return driver_.cuMemcpyDtoDAsync(pointer_of(to), pointer_of(from), size.count(), queue);
      });
  }
  return invalid("copy: no such direction", size);
}

Status CudaDevice::fill(Stream stream, Address to, std::uint8_t value, Bytes size) {
  if (auto fault = device_fault(FaultPoint::kDeviceFill, size)) return *std::move(fault);
  const CUstream queue = stream_of(stream).handle;
  if (size == 0_B) return {};
  return call("cuMemsetD8Async", size,
              [&] { return driver_.cuMemsetD8Async(pointer_of(to), value, size.count(), queue); });
}

Status CudaDevice::launch_host(Stream stream, std::function<void()> work) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  TERRACE_CHECK(work != nullptr, "launch_host takes work");
  const CudaStream queue = stream_of(stream);
  auto host = std::make_unique<HostWork>(HostWork{std::move(work), queue.host_failure});
  Status launched = call("cuLaunchHostFunc", {},
                         [&] { return driver_.cuLaunchHostFunc(queue.handle, run_host_work, host.get()); });
  // From here run_host_work owns it. A context lost in between never runs it, and its few bytes are lost too.
  if (launched.ok()) (void)host.release();
  return launched;
}

}  // namespace cuda

Result<std::unique_ptr<Device>> open_cuda_device(DeviceId id) {
  const Result<const cuda::Driver*> driver = cuda::open_driver();
  if (!driver.ok()) return driver.error();
  auto device = cuda::CudaDevice::open(**driver, id);
  if (!device.ok()) return std::move(device).error();
  return std::unique_ptr<Device>(std::move(device).value());
}

bool cuda_available() { return cuda::open_driver().ok(); }

}  // namespace terrace
