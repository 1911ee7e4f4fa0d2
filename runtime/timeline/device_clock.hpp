// When events of a device happened, on the host's monotonic clock: seconds since the clock was made.
//
// Devices tell time only between two events, and a GPU in single precision. So the clock keeps an anchor, an
// event whose time it knows, and moves it along: times are right to a few hundred nanoseconds against each
// other, and against the host to as long as an empty stream takes to answer.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "runtime/device.hpp"

namespace terrace {

class DeviceClock {
 public:
  // Sets the first anchor on `stream` and waits for it. Errors: what the device said.
  [[nodiscard]] static Result<std::unique_ptr<DeviceClock>> create(Device& device, Stream stream);
  ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // Of an event that has completed; nothing where the device does not say. Any thread.
  [[nodiscard]] std::optional<double> at(Event event) const;
  // Of the host. Any thread.
  [[nodiscard]] double now() const;

  // Once in a while, as at the begin of each step: the anchor moves to this point of the stream, as soon as
  // that has passed. From one thread.
  void move_anchor(Stream stream);

 private:
  DeviceClock(Device& device, Event anchor, Event next) : device_(device), anchor_(anchor), next_(next) {}

  Device& device_;
  mutable std::mutex mutex_;  // anchor_, anchored_at_
  Event anchor_, next_;
  double anchored_at_ = 0;
  double host_began_ = 0;
  bool next_recorded_ = false;
};

}  // namespace terrace
