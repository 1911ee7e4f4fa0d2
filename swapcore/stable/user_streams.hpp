// The streams on which other code uses blocks, as the stable-address form sees them: a number each, and a way
// to put an event behind all that a stream has been given so far.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>

#include "runtime/device.hpp"

namespace terrace {

// Where there are more streams than slots, several share one, whose event then comes behind all of them.
struct StreamSlot {
  static constexpr int kCount = 64;
  int index = 0;
  [[nodiscard]] std::uint64_t bit() const { return std::uint64_t{1} << index; }
};

class UserStreams {
 public:
  virtual ~UserStreams() = default;
  // Records `event`, which is not in use, behind what the slot's stream has been given. A stream that has
  // ended has nothing left to come behind. Any thread. Errors: what the device said.
  [[nodiscard]] virtual Status record(StreamSlot slot, Event event) = 0;
};

// Streams of the device seam itself.
class DeviceStreams final : public UserStreams {
 public:
  explicit DeviceStreams(Device& device) : device_(device) {}
  // The stream outlives every use. Precondition: fewer than StreamSlot::kCount so far.
  [[nodiscard]] StreamSlot add(Stream stream) {
    const std::lock_guard lock(mutex_);
    TERRACE_CHECK(count_ < StreamSlot::kCount, "as many streams as there are slots");
    streams_[static_cast<std::size_t>(count_)] = stream;
    return {count_++};
  }
  [[nodiscard]] Status record(StreamSlot slot, Event event) override {
    Stream stream;
    {
      const std::lock_guard lock(mutex_);
      stream = streams_[static_cast<std::size_t>(slot.index)];
    }
    Status recorded = device_.record(stream, event);
    return recorded.ok() || device_.alive(stream) ? recorded : Status();
  }

 private:
  Device& device_;
  std::mutex mutex_;
  std::array<Stream, StreamSlot::kCount> streams_{};
  int count_ = 0;
};

}  // namespace terrace
