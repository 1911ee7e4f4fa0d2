// Streams of our own and copies on a guest's device, for what moves blocks of stable addresses.
#include "hooks/intercept/cuda/guest_device.hpp"
#include "runtime/metrics.hpp"

namespace terrace::hooks::cuda {
namespace {

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: it waits for no default stream

DevicePointer pointer_of(const std::byte* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

Result<Stream> GuestDevice::create_stream(StreamPriority) {
  StreamHandle handle = nullptr;
  const CallResult result = in_context([&] { return driver_.stream_create(&handle, kNonBlocking, 0); });
  if (Status made = check("cuStreamCreateWithPriority", result); !made) return made.error();
  return adopt(handle);
}

void GuestDevice::destroy_stream(Stream stream) {
  const StreamHandle handle = handle_of(stream);
  if (handle == nullptr) return;
  (void)synchronize(stream);
  (void)in_context([&] { return driver_.stream_destroy(handle); });
  end(handle);
}

Result<double> GuestDevice::seconds_between(Event from, Event to) const {
  float milliseconds = 0;
  const EventHandle first = handle_of(from), last = handle_of(to);
  const CallResult result = in_context([&] { return driver_.event_elapsed(&milliseconds, first, last); });
  if (Status asked = check("cuEventElapsedTime", result); !asked) return asked.error();
  return static_cast<double>(milliseconds) * 1e-3;
}

Status GuestDevice::copy(Stream stream, Direction direction, Address to, const std::byte* from, Bytes size) {
  const StreamHandle handle = handle_of(stream);
  const bool up = direction == Direction::kH2D;
  const CallResult result = in_context([&] {
    return up ? driver_.copy_up(pointer_of(to), from, size.count(), handle)
              : driver_.copy_down(to, pointer_of(from), size.count(), handle);
  });
  if (result != kSuccess) metrics().add<Metric::kFaults>(FaultPoint::kDeviceCopy, 1);
  return check(up ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync", result, size);
}

Status GuestDevice::copy_batch(Stream stream, Direction direction, std::span<const Transfer> pieces) {
  for (const Transfer& piece : pieces) {
    if (Status copied = copy(stream, direction, piece.to, piece.from, piece.size); !copied) return copied;
  }
  return {};
}

Status GuestDevice::fill(Stream stream, Address to, std::uint8_t value, Bytes size) {
  const StreamHandle handle = handle_of(stream);
  return check("cuMemsetD8Async",
               in_context([&] { return driver_.fill(pointer_of(to), value, size.count(), handle); }), size);
}

// ---------------------------------------------------------------- what nobody in a guest needs

Status GuestDevice::grant_access_to(const Device&) { return not_supported("peers that are devices of ours"); }
Status GuestDevice::pin(Address, Bytes) { return not_supported("host memory of others"); }
Status GuestDevice::launch_host(Stream, std::function<void()>) { return not_supported("work of the host"); }
Result<std::uint32_t> GuestDevice::exchange_blocks() { return not_supported("exchanges"); }
Status GuestDevice::exchange(Stream, const RingExchange&) { return not_supported("exchanges"); }

}  // namespace terrace::hooks::cuda
