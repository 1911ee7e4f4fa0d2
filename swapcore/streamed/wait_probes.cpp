#include "swapcore/streamed/wait_probes.hpp"

namespace terrace {
namespace {
constexpr double kNoise = 50e-6;  // a shorter wait is the cost of an event, not of a copy
}

WaitProbes::~WaitProbes() {
  for (const Probe& probe : probes_) {
    (void)device_.synchronize(probe.resumed);
    forget(probe);
  }
}

void WaitProbes::forget(const Probe& probe) {
  device_.destroy_event(probe.arrived);
  device_.destroy_event(probe.resumed);
}

Status WaitProbes::around(Stream stream, const std::function<Status()>& wait) {
  auto arrived = device_.create_event();
  if (!arrived) return arrived.error();
  auto resumed = device_.create_event();
  if (!resumed) {
    device_.destroy_event(*arrived);
    return resumed.error();
  }
  Status status = device_.record(stream, *arrived);
  if (status) status = wait();
  if (status) status = device_.record(stream, *resumed);
  if (!status) {
    forget({*arrived, *resumed});
    return status;
  }
  probes_.push_back({*arrived, *resumed});
  return {};
}

double WaitProbes::collect() {
  double waited = 0;
  while (!probes_.empty() && device_.completed(probes_.front().resumed)) {
    const auto seconds = device_.seconds_between(probes_.front().arrived, probes_.front().resumed);
    if (seconds && *seconds > kNoise) waited += *seconds;
    forget(probes_.front());
    probes_.pop_front();
  }
  return waited;
}

}  // namespace terrace
