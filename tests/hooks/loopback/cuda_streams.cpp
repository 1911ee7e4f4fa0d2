// The loopback driver's streams, events, captures and stream-ordered memory. Functions with a default stream
// come in two variants, as the real ones.
#include <algorithm>
#include <cstdlib>

#include "tests/hooks/loopback/machine.hpp"

using namespace terrace::loopback;

extern "C" {
int cuMemAlloc_v2(Pointer* out, std::size_t bytes);
}

namespace {

enum class Zero { kLegacy, kPerThread };

// While somebody captures, calls that could depend on everything are refused and break the capture.
int refuse_in_capture(Entry& entry) {
  if (entry->captures == 0 || capture_mode == 2) return kSuccess;
  for (Stream* stream : entry->streams) stream->broken = stream->broken || stream->capturing;
  return kCaptureUnsupported;
}
int refuse_legacy_in_capture(Entry& entry, const Stream* stream) {
  if (entry->captures == 0 || stream != &entry->legacy[stream->device]) return kSuccess;
  for (Stream* each : entry->streams) each->broken = each->broken || each->capturing;
  return kCaptureImplicit;
}

constexpr Pointer kGraphMemory = 0x6000000000;

int allocate_on(Pointer* out, std::size_t bytes, void* handle, Zero zero) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  Stream* stream = stream_of(handle, zero == Zero::kPerThread);
  if (out == nullptr || bytes == 0) return kInvalidValue;
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capturing) {
    static Pointer next = kGraphMemory;
    *out = next += 1 << 20;
    entry->blocks[*out] = {-1, bytes, Block::Kind::kGraph};
    return kSuccess;
  }
  const std::size_t taken = (bytes + 511) / 512 * 512;
  if (taken > kCapacity - entry->used[stream->device]) return kOutOfMemory;
  entry->used[stream->device] += taken;
  *out = entry->next_address;
  entry->next_address += taken;
  entry->blocks[*out] = {stream->device, taken, Block::Kind::kPool};
  return kSuccess;
}

int free_on(Pointer address, void* handle, Zero zero) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  if (stream_of(handle, zero == Zero::kPerThread) == nullptr) return kInvalidHandle;
  const auto block = entry->blocks.find(address);
  if (address == 0 || block == entry->blocks.end()) return kInvalidValue;
  const Block freed = block->second;
  if (freed.device >= 0) {
    const std::size_t step =
        freed.bytes >= kGranularity / 2 && freed.kind == Block::Kind::kPlain ? kGranularity : 512;
    entry->used[freed.device] -= (freed.bytes + step - 1) / step * step;
  }
  entry->blocks.erase(block);
  return kSuccess;
}

int begin(void* handle, Zero zero) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  Stream* stream = stream_of(handle, zero == Zero::kPerThread);
  if (stream == nullptr) return kInvalidHandle;
  if (stream == &entry->legacy[stream->device]) return kCaptureUnsupported;
  stream->capturing = true;
  stream->graph = new Graph;
  stream->broken = false;
  ++entry->captures;
  return kSuccess;
}

int end(void* handle, void** graph, Zero zero) {
  const Entry entry;
  Stream* stream = stream_of(handle, zero == Zero::kPerThread);
  if (stream == nullptr || !stream->capturing) return kInvalidValue;
  stream->capturing = false;
  --entry->captures;
  if (!stream->broken) entry->graphs.insert(stream->graph);
  *graph = stream->broken ? nullptr : stream->graph;
  return stream->broken ? kCaptureInvalidated : kSuccess;
}

struct PoolPlace {
  char device[kDevices + 1];
};
PoolPlace default_pools, other_pool;

}  // namespace

extern "C" {
#define API __attribute__((visibility("default"))) int
API cuStreamCreate(void** out, unsigned) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  auto* made = new Stream;
  made->device = current_device < 0 ? 0 : current_device;
  entry->streams.insert(made);
  return *out = made, kSuccess;
}
API cuStreamCreateWithPriority(void** out, unsigned flags, int) { return cuStreamCreate(out, flags); }
API cuStreamIsCapturing(void* handle, int* captured) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  const Stream* stream = stream_of(handle, false);
  if (stream == nullptr) return kInvalidHandle;
  return *captured = stream->capturing ? 1 : 0, kSuccess;
}
API cuStreamDestroy_v2(void* handle) {
  Entry entry;
  auto* stream = static_cast<Stream*>(handle);
  if (entry->streams.count(stream) == 0) return kInvalidHandle;
  await_work(entry, *stream);
  entry->streams.erase(stream);
  if (stream->capturing) --entry->captures;
  for (Event* event : entry->events) {
    if (event->stream == stream) event->stream = nullptr;
  }
  std::erase_if(entry->waits,
                [&](const auto& each) { return each.first.first == stream || each.first.second == stream; });
  if (!stream->served) delete stream;  // else its thread waits with it
  return kSuccess;
}
API cuStreamSynchronize(void* handle) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  if (const int refused = refuse_in_capture(entry); refused != kSuccess) return refused;
  Stream* stream = stream_of(handle, false);
  if (stream == nullptr) return kInvalidHandle;
  await_work(entry, *stream);
  stream->busy = false;
  stream->reached = stream->recorded;
  entry->changed.notify_all();
  return kSuccess;
}
API cuStreamGetCtx(void* handle, void** context) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  const Stream* stream = stream_of(handle, false);
  if (stream == nullptr) return kInvalidHandle;
  return *context = &entry->legacy[stream->device], kSuccess;
}
API cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}
API cuEventCreate(void** out, unsigned) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  auto* made = new Event;
  entry->events.insert(made);
  return *out = made, kSuccess;
}
API cuEventDestroy_v2(void* handle) {
  const Entry entry;
  if (entry->events.erase(static_cast<Event*>(handle)) == 0) return kInvalidHandle;
  delete static_cast<Event*>(handle);
  return kSuccess;
}
API cuEventRecord(void* handle, void* on) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  Stream* stream = stream_of(on, false);
  if (stream == nullptr || entry->events.count(static_cast<Event*>(handle)) == 0) return kInvalidHandle;
  if (const int refused = refuse_legacy_in_capture(entry, stream); refused != kSuccess) return refused;
  *static_cast<Event*>(handle) = {stream, ++stream->recorded};
  if (!stream->work.empty()) {
    give_work(*stream, {.reach = stream->recorded});
  } else if (!stream->busy) {
    stream->reached = stream->recorded;
  }
  return kSuccess;
}
API cuEventQuery(void* handle) {
  Entry entry(handle);
  if (entry.result() != kSuccess) return entry.result();
  if (const int refused = refuse_in_capture(entry); refused != kSuccess) return refused;
  const auto* event = static_cast<Event*>(handle);
  return event->stream == nullptr || event->stream->reached >= event->point ? kSuccess : kNotReady;
}
API cuEventSynchronize(void* handle) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  auto* event = static_cast<Event*>(handle);
  const Event when = *event;
  if (when.stream == nullptr) return kSuccess;
  entry.wait([&] { return when.stream->work.empty() || when.stream->reached >= when.point; });
  when.stream->reached = std::max(when.stream->reached, when.point);
  entry->changed.notify_all();
  return kSuccess;
}
API cuStreamWaitEvent(void* handle, void* event, unsigned) {
  Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  Stream* stream = stream_of(handle, false);
  if (stream == nullptr) return kInvalidHandle;
  if (const int refused = refuse_legacy_in_capture(entry, stream); refused != kSuccess) return refused;
  const Event when = *static_cast<Event*>(event);
  ++entry->waits[{stream, when.stream}];
  // A stream that only looks busy is nobody to wait for.
  if (when.stream != nullptr && !when.stream->work.empty() && when.stream->reached < when.point)
    give_work(*stream, {.behind = when.stream, .until = when.point});
  return kSuccess;
}

API cuMemAllocAsync(Pointer* out, std::size_t bytes, void* stream) {
  return allocate_on(out, bytes, stream, Zero::kLegacy);
}
API cuMemAllocAsync_ptsz(Pointer* out, std::size_t bytes, void* stream) {
  return allocate_on(out, bytes, stream, Zero::kPerThread);
}
API cuMemAllocFromPoolAsync(Pointer* out, std::size_t bytes, void*, void* stream) {
  return allocate_on(out, bytes, stream, Zero::kLegacy);
}
API cuMemAllocFromPoolAsync_ptsz(Pointer* out, std::size_t bytes, void*, void* stream) {
  return allocate_on(out, bytes, stream, Zero::kPerThread);
}
API cuMemFreeAsync(Pointer address, void* stream) { return free_on(address, stream, Zero::kLegacy); }
API cuMemFreeAsync_ptsz(Pointer address, void* stream) { return free_on(address, stream, Zero::kPerThread); }
API cuStreamBeginCapture_v2(void* stream, int) { return begin(stream, Zero::kLegacy); }
API cuStreamBeginCapture_v2_ptsz(void* stream, int) { return begin(stream, Zero::kPerThread); }
API cuStreamEndCapture(void* stream, void** graph) { return end(stream, graph, Zero::kLegacy); }
API cuStreamEndCapture_ptsz(void* stream, void** graph) { return end(stream, graph, Zero::kPerThread); }

API cuDeviceGetDefaultMemPool(void** pool, int device) {
  const Entry entry;
  if (entry.result() != kSuccess) return entry.result();
  if (device < 0 || device >= kDevices) return kInvalidValue;
  return *pool = &default_pools.device[device], kSuccess;
}
API cuDeviceSetMemPool(int, void*) { return kSuccess; }
API cuMemPoolGetAttribute(void*, int attribute, void* value) {
  if (attribute <= 3) return *static_cast<int*>(value) = 1, kSuccess;
  return *static_cast<std::uint64_t*>(value) = attribute == 4 ? 77 : 0, kSuccess;
}
API cuMemPoolSetAttribute(void*, int, void*) { return kSuccess; }
API cuMemPoolTrimTo(void*, std::size_t) { return kSuccess; }
API cuMemPoolSetAccess(void*, const void*, std::size_t) { return kSuccess; }
API cuMemPoolExportPointer(void*, Pointer) { return kInvalidValue; }

// Work that nobody waits for comes to a stream, or ends.
API loopback_busy(void* handle, int busy) {
  const Entry entry;
  Stream* stream = stream_of(handle, false);
  stream->busy = busy != 0;
  if (!stream->busy) stream->reached = stream->recorded;
  return kSuccess;
}
// How often the first stream was made to wait for the second.
API loopback_waits(void* first, void* second) {
  const Entry entry;
  return entry->waits[{stream_of(first, false), stream_of(second, false)}];
}
__attribute__((visibility("default"))) void* loopback_other_pool() { return &other_pool; }

API cuEventElapsedTime(float* milliseconds, void*, void*) {
  const Entry entry;
  return *milliseconds = 1, entry.result();
}
API cuModuleUnload(void*) { return kSuccess; }
#undef API
}
