// The work of the CUDA device: streams, events, copies, host functions.
#include <exception>

#include "runtime/cuda/cuda_device.hpp"

#include "runtime/device_fault.hpp"
#include "runtime/pin_step.hpp"

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

// Calls part(offset, length) for the parts of a copy's host range between which pinned ranges may meet.
template <typename Part>
Status in_parts(const std::byte* host, Bytes size, Part&& part) {
  for (Bytes at; at < size;) {
    const Bytes length = up_to_pin_step(host + at.count(), size - at);
    if (Status done = part(at.count(), length); !done.ok()) return done;
    at += length;
  }
  return {};
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
  CudaStream stream{.host_failure = std::make_shared<HostFailure>()};
  const int level = priority == StreamPriority::kHigh ? priorities_.high : priorities_.normal;
  const Status created = call("cuStreamCreateWithPriority", {}, [&] {
    return driver_.cuStreamCreateWithPriority(&stream.handle, CU_STREAM_NON_BLOCKING, level);
  });
  if (!created.ok()) return created.error();
  return Stream{.id = streams_.insert(std::move(stream))};
}

Result<Stream> CudaDevice::adopt_stream(void* native) {
  if (auto fault = device_fault(FaultPoint::kDeviceCreateStream)) return *std::move(fault);
  CudaStream stream{.handle = static_cast<CUstream>(native),
                    .owner = CudaStream::Owner::kFramework,
                    .host_failure = std::make_shared<HostFailure>()};
  return Stream{.id = streams_.insert(std::move(stream))};
}

void CudaDevice::destroy_stream(Stream stream) {
  // It stays alive until its work has finished: alive() promises that.
  const CudaStream queue = stream_of(stream);
  if (queue.owner == CudaStream::Owner::kFramework) {
    TERRACE_CHECK(streams_.erase(stream.id).has_value(), "a stream is destroyed once");
    count_stream_end();
    return;
  }
  (void)in_context([&] { return driver_.cuStreamSynchronize(queue.handle); });
  TERRACE_CHECK(streams_.erase(stream.id).has_value(), "a stream is destroyed once");
  (void)in_context([&] { return driver_.cuStreamDestroy(queue.handle); });
  count_stream_end();
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
  // Blocking: a host thread that waits for it sleeps, and spins no core away.
  const Status created =
      call("cuEventCreate", {}, [&] { return driver_.cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC); });
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
  const std::optional<CudaStream> queue = streams_.find(stream.id);
  if (!queue) return invalid("record on a stream that has ended", {});
  const CUevent mark = event_of(event);
  return call("cuEventRecord", {}, [&] { return driver_.cuEventRecord(mark, queue->handle); });
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
  const CUresult answer = in_context([&] { return driver_.cuEventQuery(mark); });
  if (answer == CUDA_SUCCESS) return true;
  // A lost device completes nothing more: whoever polls must go on, to the call that says so. Other refusals,
  // a capture on another thread among them, say nothing of the event.
  const Status asked = check(driver_, answer, {.call = "cuEventQuery", .size = {}, .device = info_.id});
  return asked.error().code == Errc::kDeviceLost;
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
      return in_parts(from, size, [&](std::uint64_t at, Bytes part) {
        return call("cuMemcpyHtoDAsync", part, [&] {
          return driver_.cuMemcpyHtoDAsync(pointer_of(to + at), from + at, part.count(), queue);
        });
      });
    case Direction::kD2H:
      return in_parts(to, size, [&](std::uint64_t at, Bytes part) {
        return call("cuMemcpyDtoHAsync", part, [&] {
          return driver_.cuMemcpyDtoHAsync(to + at, pointer_of(from + at), part.count(), queue);
        });
      });
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
    const auto add = [&](std::uint64_t at, Bytes part) {
      to.push_back(pointer_of(piece.to + at));
      from.push_back(pointer_of(piece.from + at));
      sizes.push_back(part.count());
      return Status();
    };
    total += piece.size;
    if (direction == Direction::kH2D || direction == Direction::kD2H) {
      (void)in_parts(direction == Direction::kH2D ? piece.from : piece.to, piece.size, add);
    } else if (piece.size > 0_B) {
      (void)add(0, piece.size);
    }
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

// Without a kernel and without the host: the front end of the stream does it.
Status CudaDevice::write_word(Stream stream, std::atomic<std::uint32_t>& word, std::uint32_t value) {
  if (auto fault = device_fault(FaultPoint::kDeviceLaunch)) return *std::move(fault);
  if (driver_.cuStreamWriteValue32 == nullptr)
    return Error{.code = Errc::kNotSupported, .text = "cuda: this driver has no cuStreamWriteValue32"};
  const CUstream queue = stream_of(stream).handle;
  const CUdeviceptr at = pointer_of(reinterpret_cast<std::byte*>(&word));
  return call("cuStreamWriteValue32", Bytes(sizeof word),
              [&] { return driver_.cuStreamWriteValue32(queue, at, value, CU_STREAM_WRITE_VALUE_DEFAULT); });
}

}  // namespace terrace::cuda
