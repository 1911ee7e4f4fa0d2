// The streams of a guest's context as the stable-address form sees them (swapcore/stable/user_streams.hpp).
//
// A stream gets its slot when it is first used, under a lock; from then on finding it takes none. A handle
// keeps its slot when its stream ends: another stream of that value takes it over. Streams beyond the slots
// share them.
//
// A thread's own default stream cannot be named by another thread, so that thread leaves an event behind each
// of its uses; all of them share one slot.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "hooks/intercept/cuda/guest_device.hpp"
#include "swapcore/stable/user_streams.hpp"

namespace terrace::hooks::cuda {

class GuestStreams final : public UserStreams {
 public:
  explicit GuestStreams(GuestDevice& device, const DriverCalls& driver) : device_(device), driver_(driver) {}

  static constexpr StreamSlot kThreadsOwn{StreamSlot::kCount - 1};
  // `stream` is resolved, and of this context.
  [[nodiscard]] StreamSlot slot_of(StreamHandle stream) {
    if (const auto known = find(stream)) [[likely]]
      return *known;
    return add(stream);
  }
  // That of a stream which has been used.
  [[nodiscard]] std::optional<StreamSlot> find(StreamHandle stream) const {
    if (stream == kPerThreadStream) return kThreadsOwn;
    std::size_t at = home_of(stream);
    for (std::size_t probes = 0; probes < kPlaces; ++probes, at = (at + 1) % kPlaces) {
      const Place& place = places_[at];
      const StreamHandle known = place.stream.load(std::memory_order_acquire);
      if (known == nullptr) break;
      if (known == stream && place.alive.load(std::memory_order_relaxed)) [[likely]]
        return StreamSlot{place.slot.load(std::memory_order_relaxed)};
    }
    return std::nullopt;
  }
  // The stream is about to end, and its work has been waited for.
  void ended(StreamHandle stream);
  // A thread has used its own default stream; `event` is its own. Errors: what the driver says.
  [[nodiscard]] CallResult leave_behind(EventHandle& event);

  [[nodiscard]] Status record(StreamSlot slot, Event event) override;

 private:
  static constexpr std::size_t kPlaces = 1024;
  struct Place {
    std::atomic<StreamHandle> stream{nullptr};  // written once
    std::atomic<int> slot{0};
    std::atomic<bool> alive{false};
  };
  static std::size_t home_of(StreamHandle stream) {
    return (reinterpret_cast<std::uintptr_t>(stream) * 0x9E3779B97F4A7C15ULL >> 32) % kPlaces;
  }
  [[nodiscard]] StreamSlot add(StreamHandle stream);
  [[nodiscard]] Place* place_of(StreamHandle stream);  // mutex_ held; null: all are taken
  [[nodiscard]] Status gather(const std::vector<StreamHandle>& streams, Stream into);

  GuestDevice& device_;
  const DriverCalls& driver_;
  std::array<Place, kPlaces> places_{};
  std::mutex mutex_;                 // all below, and writing to the places
  int streams_ = 0;                  // so far
  std::vector<StreamHandle> crowd_;  // for which no place was left: in the last slot but one
  std::vector<EventHandle> threads_;
  Stream meeting_{};  // where several streams are waited for
};

}  // namespace terrace::hooks::cuda
