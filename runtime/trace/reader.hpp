// Reads a trace from any source of bytes, an event at a time, in bounded memory.
//
// What it gives is consistent: every free names a live block, sizes and the number of live blocks are within
// the bounds of the format. Errors name the source, the event and the byte offset.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/result.hpp"
#include "runtime/trace/format.hpp"

namespace terrace::trace {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Fills `to` from the front and returns how much; nothing: the end. Errors: kIo.
  [[nodiscard]] virtual Result<std::size_t> read(std::span<std::byte> to) = 0;
};

class Reader {
 public:
  // Reads the header. `name` stands in front of every error. Errors: kInvalidArgument (not a trace, empty, of
  // another version), kIo.
  [[nodiscard]] static Result<Reader> open(std::unique_ptr<ByteSource> source, std::string name);

  [[nodiscard]] const Header& header() const { return header_; }
  // The next event; none at the end. Errors: kInvalidArgument (the file is damaged), kIo. Nothing can be read
  // after an error.
  [[nodiscard]] Result<std::optional<Event>> next();
  // At the end: the file broke off inside an event, which was dropped.
  [[nodiscard]] bool torn() const { return torn_; }
  [[nodiscard]] std::size_t live_blocks() const { return live_.size(); }

 private:
  enum class Cut : std::uint8_t { kNothing, kAtEnd, kTooLong };  // how reading a number can fail

  Reader(std::unique_ptr<ByteSource> source, std::string name);
  [[nodiscard]] Status fill();
  [[nodiscard]] Status read_header();
  [[nodiscard]] Result<std::string> read_name(const char* what);
  Cut number(std::uint64_t& value);
  Cut decode(unsigned head, Event& event, std::uint64_t& last);
  [[nodiscard]] Status admit(Event& event, std::uint64_t last);
  [[nodiscard]] std::size_t left() const { return end_ - at_; }
  [[nodiscard]] std::uint64_t offset() const { return consumed_ + at_; }
  [[nodiscard]] Error damaged(const std::string& what) const;

  std::unique_ptr<ByteSource> source_;
  std::string name_;
  Header header_;
  std::vector<std::byte> buffer_;
  std::size_t at_ = 0;          // of buffer_: the next byte
  std::size_t end_ = 0;         // of what is in it
  std::uint64_t consumed_ = 0;  // bytes before buffer_
  bool exhausted_ = false;      // the source has no more
  bool torn_ = false;
  std::uint64_t events_ = 0;
  std::uint64_t event_offset_ = 0;
  std::uint64_t allocations_ = 0;
  std::uint64_t stream_ = 0;
  std::uint64_t microseconds_ = 0;
  std::uint32_t thread_ = 0;
  std::unordered_map<std::uint64_t, std::uint64_t> live_;  // id to size
};

}  // namespace terrace::trace
