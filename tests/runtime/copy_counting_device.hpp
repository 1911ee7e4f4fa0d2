// An emulated device seen through a counter: what each stream has been given to copy, how much of it is under
// way, and, where a test says so, not one copy more than it lets through.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/runtime/passing_device.hpp"

namespace terrace {

class CopyCountingDevice final : public PassingDevice {
 public:
  using PassingDevice::PassingDevice;

  struct Batch {
    Stream stream;
    Bytes bytes;
    std::size_t pieces;
  };
  // Every copy_batch() so far, oldest first.
  [[nodiscard]] std::vector<Batch> batches() const {
    const std::lock_guard lock(mutex_);
    return batches_;
  }
  // The most bytes that a stream had been given and not yet moved.
  [[nodiscard]] Bytes most_under_way(Stream stream) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    return found == streams_.end() ? Bytes() : found->second.peak;
  }
  // The bytes that it has been given and not yet moved.
  [[nodiscard]] Bytes under_way(Stream stream) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    return found == streams_.end() ? Bytes() : found->second.under_way;
  }
  // Every stream made through here, oldest first.
  [[nodiscard]] std::vector<Stream> created() const {
    const std::lock_guard lock(mutex_);
    return created_;
  }
  // Events that an engine's watching threads have waited for.
  [[nodiscard]] int watched() const {
    const std::lock_guard lock(mutex_);
    return watched_;
  }
  // Copies that wait in their stream for a turn; all before them has been done.
  [[nodiscard]] int at_the_turn(Stream stream) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    return found == streams_.end() ? 0 : found->second.waiting;
  }
  // What happens right before the next wait() of a stream for an event.
  void before_next_wait(std::function<void()> happens) { before_wait_ = std::move(happens); }
  // wait() calls so far that named the stream.
  [[nodiscard]] int waits(Stream stream) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    return found == streams_.end() ? 0 : found->second.waits;
  }
  // From now on each copy_batch() waits in its stream until let() has a turn for it.
  void hold_copies() {
    const std::lock_guard lock(mutex_);
    held_ = true;
  }
  void let(Stream stream, int copies) {
    {
      const std::lock_guard lock(mutex_);
      streams_[stream].turns += copies;
    }
    changed_.notify_all();
  }
  void let_all() {
    {
      const std::lock_guard lock(mutex_);
      held_ = false;
    }
    changed_.notify_all();
  }

  Status copy_batch(Stream stream, Direction direction, std::span<const Transfer> pieces) override {
    Bytes size;
    for (const Transfer& piece : pieces) size += piece.size;
    {
      const std::lock_guard lock(mutex_);
      batches_.push_back({stream, size, pieces.size()});
      Counts& counts = streams_[stream];
      counts.under_way += size;
      counts.peak = std::max(counts.peak, counts.under_way);
    }
    Status queued = PassingDevice::launch_host(stream, [this, stream] { take_turn(stream); });
    if (queued.ok()) queued = PassingDevice::copy_batch(stream, direction, pieces);
    if (queued.ok()) {
      queued = PassingDevice::launch_host(stream, [this, stream, size] {
        const std::lock_guard lock(mutex_);
        streams_[stream].under_way -= size;
      });
    }
    return queued;
  }
  using PassingDevice::synchronize;
  Status synchronize(Event event) override {
    std::array<char, 16> thread{};
    pthread_getname_np(pthread_self(), thread.data(), thread.size());
    if (std::string_view(thread.data()) == "terrace-watch") {
      const std::lock_guard lock(mutex_);
      ++watched_;
    }
    return PassingDevice::synchronize(event);
  }

  Result<Stream> create_stream(StreamPriority priority) override {
    auto stream = PassingDevice::create_stream(priority);
    const std::lock_guard lock(mutex_);
    if (stream.ok()) created_.push_back(*stream);
    return stream;
  }
  Status wait(Stream stream, Event event) override {
    if (const auto happens = std::exchange(before_wait_, nullptr)) happens();
    {
      const std::lock_guard lock(mutex_);
      ++streams_[stream].waits;
    }
    return PassingDevice::wait(stream, event);
  }

 private:
  struct Counts {
    Bytes under_way, peak;
    int turns = 0, waiting = 0, waits = 0;
  };
  void take_turn(Stream stream) {
    std::unique_lock lock(mutex_);
    ++streams_[stream].waiting;
    changed_.wait(lock, [&] { return !held_ || streams_[stream].turns > 0; });
    --streams_[stream].waiting;
    if (held_) --streams_[stream].turns;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::function<void()> before_wait_;  // of the test's own thread
  int watched_ = 0;
  std::map<Stream, Counts> streams_;
  std::vector<Batch> batches_;
  std::vector<Stream> created_;
};

}  // namespace terrace
