// Events to be used again: each goes back to the pool when the last who holds it lets go.
//
// Safe from any thread. The pool outlives its events, and destroys them all in the end.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "runtime/assert.hpp"
#include "runtime/device.hpp"

namespace terrace {

class EventPool {
 public:
  using Held = std::shared_ptr<const Event>;

  explicit EventPool(Device& device) : device_(device) {}
  ~EventPool() {
    TERRACE_CHECK(out_ == 0, "events go back before their pool");
    for (const Event event : idle_) device_.destroy_event(event);
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  // Errors: what the device says of a new event.
  [[nodiscard]] Result<Held> take() {
    Event event;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
        ++out_;
      }
    }
    if (event == Event{}) {
      const Result<Event> created = device_.create_event();
      if (!created.ok()) return created.error();
      event = *created;
      const std::lock_guard lock(mutex_);
      ++out_;
    }
    return Held(new Event(event), [this](const Event* held) {
      give_back(*held);
      delete held;
    });
  }

 private:
  void give_back(Event event) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(event);
    --out_;
  }

  Device& device_;
  std::mutex mutex_;
  std::vector<Event> idle_;
  int out_ = 0;
};

}  // namespace terrace
