// How long a stream waited: a pair of events around each wait, read when both have passed.
#pragma once

#include <functional>
#include <list>

#include "runtime/device.hpp"

namespace terrace {

class WaitProbes {
 public:
  explicit WaitProbes(Device& device) : device_(device) {}
  ~WaitProbes();  // the host waits for what has been recorded
  WaitProbes(const WaitProbes&) = delete;
  WaitProbes& operator=(const WaitProbes&) = delete;

  // Queues `wait` on `stream` between the two events. Errors: what the device said, or `wait`.
  [[nodiscard]] Status around(Stream stream, const std::function<Status()>& wait);
  // Seconds of the waits known since the last call; those shorter than an event's own cost count as none.
  [[nodiscard]] double collect();

 private:
  struct Probe {
    Event arrived, resumed;
  };
  void forget(const Probe& probe);

  Device& device_;
  std::list<Probe> probes_;  // oldest first
};

}  // namespace terrace
