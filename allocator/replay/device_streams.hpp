// The streams of a replay on a device, made when they are first prepared.
#pragma once

#include <array>
#include <optional>

#include "allocator/replay/replayed_allocator.hpp"

namespace terrace {

class DeviceStreams {
 public:
  explicit DeviceStreams(Device& device) : device_(device) {}
  ~DeviceStreams() {
    for (const auto& stream : streams_) {
      if (stream) device_.destroy_stream(*stream);
    }
  }
  DeviceStreams(const DeviceStreams&) = delete;
  DeviceStreams& operator=(const DeviceStreams&) = delete;

  [[nodiscard]] Status prepare(ReplayStream stream) {
    auto& made = streams_.at(stream.number);
    if (made) return {};
    auto created = device_.create_stream(StreamPriority::kNormal);
    if (!created) return created.error();
    made = *created;
    return {};
  }
  // Precondition: prepared.
  [[nodiscard]] Stream at(ReplayStream stream) const { return streams_.at(stream.number).value(); }

 private:
  Device& device_;
  std::array<std::optional<Stream>, kMostReplayStreams> streams_;
};

}  // namespace terrace
