// A device as it is. Test doubles derive from it, and say what they do in another way.
#pragma once

#include <utility>

#include "runtime/device.hpp"
#include "runtime/ring_exchange.hpp"

namespace terrace {

class PassingDevice : public Device {
 public:
  explicit PassingDevice(Device& inner) : inner_(inner) {}

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
  Result<Stream> create_stream(StreamPriority priority) override { return inner_.create_stream(priority); }
  void destroy_stream(Stream stream) override {
    inner_.destroy_stream(stream);
    count_stream_end();
  }
  bool alive(Stream stream) const override { return inner_.alive(stream); }
  Status synchronize(Stream stream) override { return inner_.synchronize(stream); }
  Result<Event> create_event() override { return inner_.create_event(); }
  void destroy_event(Event event) override { inner_.destroy_event(event); }
  Status record(Stream stream, Event event) override { return inner_.record(stream, event); }
  Status wait(Stream stream, Event event) override { return inner_.wait(stream, event); }
  Status synchronize(Event event) override { return inner_.synchronize(event); }
  bool completed(Event event) const override { return inner_.completed(event); }
  Result<double> seconds_between(Event from, Event to) const override {
    return inner_.seconds_between(from, to);
  }
  Status copy(Stream stream, Direction direction, Address to, const std::byte* from, Bytes size) override {
    return inner_.copy(stream, direction, to, from, size);
  }
  Status copy_batch(Stream stream, Direction direction, std::span<const Transfer> pieces) override {
    return inner_.copy_batch(stream, direction, pieces);
  }
  Status fill(Stream stream, Address to, std::uint8_t value, Bytes size) override {
    return inner_.fill(stream, to, value, size);
  }
  Status launch_host(Stream stream, std::function<void()> work) override {
    return inner_.launch_host(stream, std::move(work));
  }
  Result<std::uint32_t> exchange_blocks() override { return inner_.exchange_blocks(); }
  Status exchange(Stream stream, const RingExchange& exchange) override {
    return inner_.exchange(stream, exchange);
  }
  void* native_stream(Stream stream) const override { return inner_.native_stream(stream); }
  Status bind_thread() override { return inner_.bind_thread(); }

 private:
  Device& inner_;
};

}  // namespace terrace
