// A thread that waits for events, one after the other, and rings a bell as each completes.
//
// It sleeps in the device's own wait. A host function behind each event would need a stream of its own, and
// streams share hardware queues: it then runs when everything queued there has, on an H200 a whole window
// late.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "runtime/copy_events.hpp"

namespace terrace {

class EventWatch {
 public:
  // `ring` is called on the watch's thread, after each event, completed or failed. Does not throw.
  // Throws std::system_error where the process may have no more threads.
  EventWatch(Device& device, std::function<void()> ring);
  ~EventWatch();  // waits for the event in hand; those behind it are let go
  EventWatch(const EventWatch&) = delete;
  EventWatch& operator=(const EventWatch&) = delete;

  // Completes after those given before, as a rule: in order of one stream. Any thread.
  void add(EventPool::Held event);

 private:
  void serve(const std::stop_token& stop);

  Device& device_;
  const std::function<void()> ring_;
  std::mutex mutex_;
  std::condition_variable_any woken_;
  std::deque<EventPool::Held> events_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace terrace
