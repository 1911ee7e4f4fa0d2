// Traces in memory, for tests: bytes to read from, and events to bytes.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/trace/reader.hpp"

namespace terrace::test {

// Gives at most `piece` bytes a call.
class MemorySource final : public trace::ByteSource {
 public:
  explicit MemorySource(std::string bytes, std::size_t piece = 1 << 20)
      : bytes_(std::move(bytes)), piece_(piece) {}
  Result<std::size_t> read(std::span<std::byte> to) override {
    const std::size_t length = std::min({to.size(), piece_, bytes_.size() - at_});
    std::memcpy(to.data(), bytes_.data() + at_, length);
    at_ += length;
    return length;
  }

 private:
  std::string bytes_;
  std::size_t piece_;
  std::size_t at_ = 0;
};

class TraceBytes {
 public:
  explicit TraceBytes(trace::Layer layer = trace::Layer::kPool) {
    std::array<std::byte, trace::kMostHeaderBytes> header;
    append(header, trace::encode_header(header, layer, "emulated", "test"));
  }
  std::uint64_t allocate(Bytes size, std::uint64_t stream = 0, std::optional<Pool> pool = trace::kUnknown) {
    trace::Event event;
    event.id = encoder_.allocations();
    event.size = size;
    event.stream = stream;
    event.pool = pool;
    add(event);
    return event.id;
  }
  void free(std::uint64_t id, std::uint64_t stream = 0) {
    trace::Event event;
    event.kind = trace::Event::Kind::kFree;
    event.id = id;
    event.stream = stream;
    add(event);
  }
  void add(const trace::Event& event) {
    std::array<std::byte, trace::kMostEventBytes> place;
    append(place, encoder_.encode(place, event));
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  void append(std::span<const std::byte> from, std::size_t length) {
    text_.append(reinterpret_cast<const char*>(from.data()), length);
  }
  trace::EventEncoder encoder_;
  std::string text_;
};

[[nodiscard]] inline Result<trace::Reader> reader_of(std::string bytes, std::size_t piece = 1 << 20) {
  return trace::Reader::open(std::make_unique<MemorySource>(std::move(bytes), piece), "t");
}

struct ReadTrace {
  trace::Header header;
  std::vector<trace::Event> events;
  bool torn = false;
  std::string error;  // empty: read to the end
};
[[nodiscard]] inline ReadTrace read_trace(std::string bytes, std::size_t piece = 1 << 20) {
  ReadTrace read;
  auto reader = reader_of(std::move(bytes), piece);
  if (!reader) {
    read.error = reader.error().text;
    return read;
  }
  read.header = reader->header();
  while (true) {
    const auto event = reader->next();
    if (!event) {
      read.error = event.error().text;
      return read;
    }
    if (!*event) break;
    read.events.push_back(**event);
  }
  read.torn = reader->torn();
  return read;
}

}  // namespace terrace::test
