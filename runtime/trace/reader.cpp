#include "runtime/trace/reader.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace terrace::trace {
namespace {

constexpr std::size_t kBufferBytes = 64 << 10;
static_assert(kBufferBytes > kMostHeaderBytes && kBufferBytes > kMostEventBytes);

// For reports and JSON: what a damaged file calls a process is no control sequence.
std::string printable(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text;
}

}  // namespace

Reader::Reader(std::unique_ptr<ByteSource> source, std::string name)
    : source_(std::move(source)), name_(std::move(name)), buffer_(kBufferBytes) {}

Result<Reader> Reader::open(std::unique_ptr<ByteSource> source, std::string name) {
  Reader reader(std::move(source), std::move(name));
  if (Status read = reader.read_header(); !read) return read.error();
  return reader;
}

// Afterwards the buffer holds a whole event, or all that is left.
Status Reader::fill() {
  if (left() >= kMostHeaderBytes || exhausted_) return {};
  std::memmove(buffer_.data(), buffer_.data() + at_, left());
  consumed_ += at_;
  end_ -= at_;
  at_ = 0;
  while (end_ < buffer_.size()) {
    const Result<std::size_t> got = source_->read(std::span(buffer_).subspan(end_));
    if (!got) return got.error();
    if (*got == 0) {
      exhausted_ = true;
      return {};
    }
    end_ += *got;
  }
  return {};
}

Error Reader::damaged(const std::string& what) const {
  return {.code = Errc::kInvalidArgument,
          .text = name_ + ": event " + std::to_string(events_) + " at byte " + std::to_string(event_offset_) +
                  ": " + what};
}

Status Reader::read_header() {
  const auto refuse = [this](const std::string& what) {
    return Error{.code = Errc::kInvalidArgument, .text = name_ + ": " + what};
  };
  if (Status filled = fill(); !filled) return filled;
  if (left() == 0) return refuse("empty: no allocation was recorded in it");
  if (std::memcmp(buffer_.data(), kMagic.data(), std::min(left(), kMagic.size())) != 0) {
    return refuse("not a trace; use a file written by `terrace run --record FILE`");
  }
  if (left() <= kLayerOffset) return refuse("the header breaks off at byte " + std::to_string(left()));
  const auto byte_at = [this](std::size_t offset) { return std::to_integer<unsigned>(buffer_[offset]); };
  const unsigned version = byte_at(kMagic.size()) | byte_at(kMagic.size() + 1) << 8;
  if (version != kVersion) {
    return refuse("version " + std::to_string(version) + " at byte " + std::to_string(kMagic.size()) +
                  "; this program reads version " + std::to_string(kVersion));
  }
  const unsigned layer = byte_at(kLayerOffset);
  if (layer != static_cast<unsigned>(Layer::kDriverCalls) && layer != static_cast<unsigned>(Layer::kPool)) {
    return refuse("layer " + std::to_string(layer) + " at byte " + std::to_string(kLayerOffset) +
                  "; there are 1 (driver calls) and 2 (pool)");
  }
  header_.layer = static_cast<Layer>(layer);
  at_ = kLayerOffset + 1;
  auto device_kind = read_name("device kind");
  if (!device_kind) return device_kind.error();
  auto process = read_name("process name");
  if (!process) return process.error();
  header_.device_kind = printable(std::move(*device_kind));
  header_.process = printable(std::move(*process));
  return {};
}

Result<std::string> Reader::read_name(const char* what) {
  const auto refuse = [&](const std::string& why) {
    return Error{.code = Errc::kInvalidArgument, .text = name_ + ": the header's " + what + why};
  };
  if (left() == 0) return refuse(" breaks off at byte " + std::to_string(offset()));
  const auto length = std::to_integer<std::size_t>(buffer_[at_]);
  if (length > kMostNameBytes) {
    return refuse(" has " + std::to_string(length) + " bytes at byte " + std::to_string(offset()) +
                  "; at most " + std::to_string(kMostNameBytes));
  }
  if (left() < 1 + length) return refuse(" breaks off at byte " + std::to_string(offset() + left()));
  std::string name(reinterpret_cast<const char*>(buffer_.data() + at_ + 1), length);
  at_ += 1 + length;
  return name;
}

Reader::Cut Reader::number(std::uint64_t& value) {
  value = 0;
  for (unsigned shift = 0;; shift += 7) {
    if (left() == 0) return Cut::kAtEnd;
    const auto byte = std::to_integer<std::uint64_t>(buffer_[at_++]);
    if (shift == 63 && byte > 1) return Cut::kTooLong;
    value |= (byte & 0x7f) << shift;
    if (byte < 0x80) return Cut::kNothing;
  }
}

Reader::Cut Reader::decode(unsigned head, Event& event, std::uint64_t& last) {
  std::uint64_t passed = 0, thread = thread_;
  event.stream = stream_;
  if (Cut cut = number(passed); cut != Cut::kNothing) return cut;
  if ((head & tag::kStreamFollows) != 0) {
    if (Cut cut = number(event.stream); cut != Cut::kNothing) return cut;
  }
  if ((head & tag::kThreadFollows) != 0) {
    if (Cut cut = number(thread); cut != Cut::kNothing) return cut;
  }
  if (Cut cut = number(last); cut != Cut::kNothing) return cut;
  event.microseconds = microseconds_ + passed;
  if (event.microseconds < passed || thread > std::numeric_limits<std::uint32_t>::max()) return Cut::kTooLong;
  event.thread = static_cast<std::uint32_t>(thread);
  return Cut::kNothing;
}

Status Reader::admit(Event& event, std::uint64_t last) {
  if (event.kind == Event::Kind::kAllocate) {
    if (last > kLargestBlock.count()) {
      return damaged("a block of " + std::to_string(last) + " bytes; at most " + format_bytes(kLargestBlock));
    }
    if (live_.size() == kMostLiveBlocks) {
      return damaged("one block more than " + std::to_string(kMostLiveBlocks) + " are live at once");
    }
    event.id = allocations_++;
    event.size = Bytes(last);
    live_.emplace(event.id, last);
    return {};
  }
  if (last == 0 || last > allocations_) {
    return damaged("the block allocated " + std::to_string(last) + " allocations ago is freed; there were " +
                   std::to_string(allocations_));
  }
  event.id = allocations_ - last;
  const auto live = live_.find(event.id);
  if (live == live_.end()) return damaged("block " + std::to_string(event.id) + " is freed twice");
  event.size = Bytes(live->second);
  live_.erase(live);
  return {};
}

Result<std::optional<Event>> Reader::next() {
  if (Status filled = fill(); !filled) return filled.error();
  if (left() == 0) return std::optional<Event>();
  event_offset_ = offset();
  const auto head = std::to_integer<unsigned>(buffer_[at_++]);
  const unsigned kind = head & tag::kKindMask;
  const unsigned pool = (head >> tag::kPoolShift) & tag::kPoolUnknown;
  if (kind != 1 && kind != 2) {
    return damaged("kind " + std::to_string(kind) + "; there are 1 (allocate) and 2 (free)");
  }
  if ((head & tag::kUnused) != 0 || (kind == 2 && pool != 0)) {
    return damaged("bits that version " + std::to_string(kVersion) + " does not use are set in the tag " +
                   std::to_string(head));
  }
  Event event;
  event.kind = static_cast<Event::Kind>(kind);
  if (kind == 1 && pool != tag::kPoolUnknown) event.pool = static_cast<Pool>(pool);
  std::uint64_t last = 0;
  const Cut cut = decode(head, event, last);
  if (cut == Cut::kTooLong) return damaged("a number has more bits than its field");
  if (cut == Cut::kAtEnd) {
    at_ = end_;
    torn_ = true;
    return std::optional<Event>();
  }
  if (Status admitted = admit(event, last); !admitted) return admitted.error();
  ++events_;
  stream_ = event.stream;
  thread_ = event.thread;
  microseconds_ = event.microseconds;
  return std::optional<Event>(event);
}

}  // namespace terrace::trace
