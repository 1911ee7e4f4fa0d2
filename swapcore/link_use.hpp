// How much of the link a step used, measured: bytes that moved inside the windows, of those that the windows
// could have carried.
//
// A micro-batch has a window each way, as Prediction has: outwards from its begin to its head or the last
// spill's end, inwards from the head to the first layer's backward or the last restore's end.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/copy_events.hpp"
#include "runtime/device.hpp"
#include "runtime/timeline/device_clock.hpp"

namespace terrace {

class LinkUse {
 public:
  struct Way {
    Bytes moved, capacity;  // inside the windows
  };
  using Ways = std::array<Way, 2>;  // by direction: kH2D, kD2H

  enum class Moment : std::uint8_t { kBegin, kHead, kFirstLayer, kEnd };  // of a micro-batch

  // Clock, device and stream outlive this.
  LinkUse(Device& device, Stream compute, const DeviceClock& clock)
      : device_(device), compute_(compute), clock_(clock), events_(device) {}

  // A step begins; what was gathered is forgotten.
  void begin();
  // The compute stream is at that moment. Those of one micro-batch in their order.
  void mark(Moment moment);
  // A chunk crossed the link then, in seconds of the clock. Any thread.
  void moved(Direction direction, Bytes bytes, double start, double end);
  // Of the step since begin(), whose work and copies have completed, at these rates. Nothing where a mark is
  // missing: the device refused it, or the step had another shape.
  [[nodiscard]] std::optional<Ways> measure(double h2d_bytes_per_second, double d2h_bytes_per_second);

 private:
  struct Mark {
    Moment moment;
    EventPool::Held event;
  };
  struct Move {
    double start = 0, end = 0;
    Bytes bytes;
  };
  struct Window {
    double begin = 0, end = 0;  // as planned
    double until = 0;           // moves that start before belong to it
  };
  [[nodiscard]] static Way use(const std::vector<Move>& moves, const Window& window, double rate);
  [[nodiscard]] std::optional<std::vector<std::array<double, 4>>> times() const;

  Device& device_;
  const Stream compute_;
  const DeviceClock& clock_;
  EventPool events_;
  std::vector<Mark> marks_;
  std::mutex mutex_;
  std::array<std::vector<Move>, 2> moves_;
};

}  // namespace terrace
