#include "runtime/event_watch.hpp"

#include <pthread.h>

#include <utility>

#include "runtime/thread_signals.hpp"

namespace terrace {

EventWatch::EventWatch(Device& device, std::function<void()> ring)
    : device_(device),
      ring_(std::move(ring)),
      thread_([this](const std::stop_token& stop) { serve(stop); }) {}

EventWatch::~EventWatch() {
  thread_.request_stop();
  thread_.join();
}

void EventWatch::add(EventPool::Held event) {
  {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  woken_.notify_one();
}

void EventWatch::serve(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "terrace-watch");
  leave_signals_to_others();
  (void)device_.bind_thread();
  std::unique_lock lock(mutex_);
  while (woken_.wait(lock, stop, [this] { return !events_.empty(); }) && !stop.stop_requested()) {
    const EventPool::Held event = std::move(events_.front());
    events_.pop_front();
    lock.unlock();
    (void)device_.synchronize(*event);  // whoever reaps it learns how it ended
    ring_();
    lock.lock();
  }
}

}  // namespace terrace
