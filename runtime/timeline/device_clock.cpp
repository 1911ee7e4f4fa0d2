#include "runtime/timeline/device_clock.hpp"

#include <limits>
#include <utility>

#include "runtime/clock.hpp"

namespace terrace {
namespace {
constexpr int kTries = 5;
}

Result<std::unique_ptr<DeviceClock>> DeviceClock::create(Device& device, Stream stream) {
  const auto anchor = device.create_event();
  if (!anchor) return anchor.error();
  const auto next = device.create_event();
  if (!next) {
    device.destroy_event(*anchor);
    return next.error();
  }
  std::unique_ptr<DeviceClock> clock(new DeviceClock(device, *anchor, *next));
  // Nothing else may lie between the two looks at the host's clock; of several tries the one with least
  // between them.
  if (Status idle = device.synchronize(stream); !idle) return idle.error();
  double closest = std::numeric_limits<double>::max();
  for (int i = 0; i < kTries; ++i) {
    const double before = seconds_of(steady_clock().now());
    if (Status recorded = device.record(stream, clock->next_); !recorded) return recorded.error();
    if (Status passed = device.synchronize(clock->next_); !passed) return passed.error();
    const double after = seconds_of(steady_clock().now());
    if (after - before >= closest) continue;
    closest = after - before;
    clock->host_began_ = (before + after) / 2;
    std::swap(clock->anchor_, clock->next_);
  }
  return clock;
}

DeviceClock::~DeviceClock() {
  device_.destroy_event(anchor_);
  device_.destroy_event(next_);
}

double DeviceClock::now() const { return seconds_of(steady_clock().now()) - host_began_; }

std::optional<double> DeviceClock::at(Event event) const {
  const std::lock_guard lock(mutex_);
  const auto since = device_.seconds_between(anchor_, event);
  if (!since) return std::nullopt;
  return anchored_at_ + *since;
}

void DeviceClock::move_anchor(Stream stream) {
  if (next_recorded_) {
    if (!device_.completed(next_)) return;
    const auto moved = at(next_);
    const std::lock_guard lock(mutex_);
    if (moved) {
      anchored_at_ = *moved;
      std::swap(anchor_, next_);
    }
  }
  next_recorded_ = device_.record(stream, next_).ok();
}

}  // namespace terrace
