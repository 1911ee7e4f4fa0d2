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

#include "runtime/emulated/emulated_device.hpp"

namespace terrace {

class CopyCountingDevice final : public Device {
 public:
  explicit CopyCountingDevice(EmulatedDevice& inner) : inner_(inner) {}

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
    Status queued = inner_.launch_host(stream, [this, stream] { take_turn(stream); });
    if (queued.ok()) queued = inner_.copy_batch(stream, direction, pieces);
    if (queued.ok()) {
      queued = inner_.launch_host(stream, [this, stream, size] {
        const std::lock_guard lock(mutex_);
        streams_[stream].under_way -= size;
      });
    }
    return queued;
  }
  Status synchronize(Event event) override {
    std::array<char, 16> thread{};
    pthread_getname_np(pthread_self(), thread.data(), thread.size());
    if (std::string_view(thread.data()) == "terrace-watch") {
      const std::lock_guard lock(mutex_);
      ++watched_;
    }
    return inner_.synchronize(event);
  }

  // The rest as it is.
  const DeviceInfo& info() const override { return inner_.info(); }
  Result<Address> reserve(Bytes size) override { return inner_.reserve(size); }
  void release(Address address, Bytes size) override { inner_.release(address, size); }
  Result<Physical> create_physical(Bytes size) override { return inner_.create_physical(size); }
  Result<Physical> create_host_physical(Bytes size, int numa_node) override {
    return inner_.create_host_physical(size, numa_node);
  }
  void destroy_physical(Physical physical) override { inner_.destroy_physical(physical); }
  Status map(Address at, Physical physical, Bytes size) override { return inner_.map(at, physical, size); }
  Status map_all(Address at, std::span<const PhysicalPiece> pieces) override {
    return inner_.map_all(at, pieces);
  }
  Status unmap(Address at, Bytes size) override { return inner_.unmap(at, size); }
  Status grant_access_to(const Device& peer) override { return inner_.grant_access_to(peer); }
  Result<MemoryInfo> memory() const override { return inner_.memory(); }
  Status pin(Address host, Bytes size) override { return inner_.pin(host, size); }
  void unpin(Address host, Bytes size) override { inner_.unpin(host, size); }
  Result<Stream> create_stream(StreamPriority priority) override {
    auto stream = inner_.create_stream(priority);
    const std::lock_guard lock(mutex_);
    if (stream.ok()) created_.push_back(*stream);
    return stream;
  }
  void destroy_stream(Stream stream) override {
    inner_.destroy_stream(stream);
    count_stream_end();
  }
  bool alive(Stream stream) const override { return inner_.alive(stream); }
  Status synchronize(Stream stream) override { return inner_.synchronize(stream); }
  Result<Event> create_event() override { return inner_.create_event(); }
  void destroy_event(Event event) override { inner_.destroy_event(event); }
  Status record(Stream stream, Event event) override { return inner_.record(stream, event); }
  Status wait(Stream stream, Event event) override {
    if (const auto happens = std::exchange(before_wait_, nullptr)) happens();
    {
      const std::lock_guard lock(mutex_);
      ++streams_[stream].waits;
    }
    return inner_.wait(stream, event);
  }
  Status launch_host(Stream stream, std::function<void()> work) override {
    return inner_.launch_host(stream, std::move(work));
  }
  bool completed(Event event) const override { return inner_.completed(event); }
  Result<double> seconds_between(Event from, Event to) const override {
    return inner_.seconds_between(from, to);
  }
  Status copy(Stream stream, Direction direction, Address to, const std::byte* from, Bytes size) override {
    return inner_.copy(stream, direction, to, from, size);
  }
  Status fill(Stream stream, Address to, std::uint8_t value, Bytes size) override {
    return inner_.fill(stream, to, value, size);
  }
  Result<std::uint32_t> exchange_blocks() override { return inner_.exchange_blocks(); }
  Status exchange(Stream stream, const RingExchange& exchange) override {
    return inner_.exchange(stream, exchange);
  }
  void* native_stream(Stream stream) const override { return inner_.native_stream(stream); }
  Status bind_thread() override { return inner_.bind_thread(); }

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

  EmulatedDevice& inner_;
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
