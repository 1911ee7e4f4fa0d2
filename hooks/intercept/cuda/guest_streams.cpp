#include "hooks/intercept/cuda/guest_streams.hpp"

#include <algorithm>

namespace terrace::hooks::cuda {
namespace {

constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kCrowd = StreamSlot::kCount - 2;

Status refused(const char* call, CallResult result) {
  return Error{.code = Errc::kIo, .text = std::string(call) + " answered " + std::to_string(result)};
}

}  // namespace

GuestStreams::Place* GuestStreams::place_of(StreamHandle stream) {
  std::size_t at = home_of(stream);
  for (std::size_t probes = 0; probes < kPlaces; ++probes, at = (at + 1) % kPlaces) {
    const StreamHandle there = places_[at].stream.load(std::memory_order_relaxed);
    if (there == stream || there == nullptr) return &places_[at];
  }
  return nullptr;
}

StreamSlot GuestStreams::add(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  Place* const place = place_of(stream);
  if (place == nullptr) {
    if (std::find(crowd_.begin(), crowd_.end(), stream) == crowd_.end()) crowd_.push_back(stream);
    return {kCrowd};
  }
  if (place->stream.load(std::memory_order_relaxed) == nullptr)
    place->slot.store(streams_++ % kCrowd, std::memory_order_relaxed);
  place->alive.store(true, std::memory_order_relaxed);
  place->stream.store(stream, std::memory_order_release);
  return {place->slot.load(std::memory_order_relaxed)};
}

void GuestStreams::ended(StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  std::erase(crowd_, stream);
  Place* const place = place_of(stream);
  if (place != nullptr && place->stream.load(std::memory_order_relaxed) == stream)
    place->alive.store(false, std::memory_order_relaxed);
}

CallResult GuestStreams::leave_behind(EventHandle& event) {
  if (event == nullptr) {
    const CallResult made = driver_.event_create(&event, kNoTiming);
    if (made != kSuccess) return made;
    const std::lock_guard lock(mutex_);
    threads_.push_back(event);
  }
  return driver_.event_record(event, kPerThreadStream);
}

// What comes behind all of these streams comes on `into`.
Status GuestStreams::gather(const std::vector<StreamHandle>& streams, Stream into) {
  EventHandle behind = nullptr;
  const auto calls = [&]() -> CallResult {
    if (const CallResult made = driver_.event_create(&behind, kNoTiming); made != kSuccess) return made;
    const StreamHandle to = device_.native_stream(into);
    for (const StreamHandle each : streams) {
      CallResult result = driver_.event_record(behind, each);
      if (result == kSuccess) result = driver_.stream_wait(to, behind, 0);
      if (result != kSuccess) return result;
    }
    return kSuccess;
  };
  const CallResult result = device_.in_context(calls);
  if (behind != nullptr) (void)device_.in_context([&] { return driver_.event_destroy(behind); });
  return result == kSuccess ? Status() : refused("cuEventRecord", result);
}

Status GuestStreams::record(StreamSlot slot, Event event) {
  const std::lock_guard lock(mutex_);
  std::vector<StreamHandle> streams;
  std::vector<EventHandle> threads;
  if (slot.index == kThreadsOwn.index) {
    threads = threads_;
  } else {
    for (const Place& place : places_) {
      if (place.stream.load(std::memory_order_relaxed) != nullptr &&
          place.alive.load(std::memory_order_relaxed) &&
          place.slot.load(std::memory_order_relaxed) == slot.index)
        streams.push_back(place.stream.load(std::memory_order_relaxed));
    }
    if (slot.index == kCrowd) streams.insert(streams.end(), crowd_.begin(), crowd_.end());
  }
  if (streams.empty() && threads.empty()) return {};  // ended: nothing left to come behind
  if (streams.size() == 1 && threads.empty()) return device_.record(device_.adopt(streams.front()), event);
  if (meeting_ == Stream{}) {
    const Result<Stream> made = device_.create_stream(StreamPriority::kNormal);
    if (!made) return made.error();
    meeting_ = *made;
  }
  if (Status gathered = gather(streams, meeting_); !gathered) return gathered;
  for (const EventHandle each : threads) {
    const CallResult result =
        device_.in_context([&] { return driver_.stream_wait(device_.native_stream(meeting_), each, 0); });
    if (result != kSuccess) return refused("cuStreamWaitEvent", result);
  }
  return device_.record(meeting_, event);
}

}  // namespace terrace::hooks::cuda
