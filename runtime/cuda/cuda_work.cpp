// The work of the CUDA device: streams, events, copies, host functions.
#include <exception>

#include "runtime/cuda/cuda_device.hpp"

#include "runtime/device_fault.hpp"

namespace terrace::cuda {

namespace {

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
    case Direction::kPeer:  // one address space: the driver sees from the addresses whose memory it is
      return call("cuMemcpyDtoDAsync", size, [&] {
        return driver_.cuMemcpyDtoDAsync(pointer_of(to), pointer_of(from), size.count(), queue);
      });
  }
  return invalid("copy: no such direction", size);
}

Status CudaDevice::copy_batch(Stream stream, Direction direction, std::span<const Transfer> pieces) {
  if (pieces.size() == 1 || driver_.cuMemcpyBatchAsync == nullptr) {
    for (const Transfer& piece : pieces) {
      if (Status copied = copy(stream, direction, piece.to, piece.from, piece.size); !copied.ok())
        return copied;
    }
    return {};
  }
  Bytes total;
  std::vector<CUdeviceptr> to;
  std::vector<CUdeviceptr> from;
  std::vector<std::size_t> sizes;
  for (const Transfer& piece : pieces) {
    if (piece.size == 0_B) continue;
    to.push_back(pointer_of(piece.to));
    from.push_back(pointer_of(piece.from));
    sizes.push_back(piece.size.count());
    total += piece.size;
  }
  if (auto fault = device_fault(FaultPoint::kDeviceCopy, total)) return *std::move(fault);
  if (sizes.empty()) return {};
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  std::size_t from_first = 0;
  const CUstream queue = stream_of(stream).handle;
  return call("cuMemcpyBatchAsync", total, [&] {
    return driver_.cuMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &attributes,
                                      &from_first, 1, queue);
  });
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

}  // namespace terrace::cuda
