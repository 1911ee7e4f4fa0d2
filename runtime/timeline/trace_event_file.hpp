// A file of trace events (the JSON that Chrome's tracing and Perfetto read) that is whole at every moment.
//
// Events gather in a buffer and go out in one write each that also moves the closing brackets: a process that
// is killed leaves valid JSON without its last buffer. From kMostBytes on events are counted and not written,
// since viewers give up on larger files. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace {

class TraceEventFile {
 public:
  static constexpr std::uint64_t kMostBytes = 1ULL << 30;
  static constexpr std::size_t kBuffer = std::size_t{64} << 10;

  // Errors: kIo, where the file cannot be written.
  [[nodiscard]] static Result<std::unique_ptr<TraceEventFile>> create(const std::string& path);
  ~TraceEventFile();  // flushes
  TraceEventFile(const TraceEventFile&) = delete;
  TraceEventFile& operator=(const TraceEventFile&) = delete;

  // One JSON object, without what separates it from others.
  void add(std::string_view event);
  void flush();
  void count_dropped();
  // Of the writes so far; after a failure nothing more is written.
  [[nodiscard]] Status status() const;

 private:
  TraceEventFile(OwnedFd file, std::string path) : path_(std::move(path)), file_(std::move(file)) {}
  void write_out();  // the lock is held
  [[nodiscard]] bool write_at(std::uint64_t place, std::string_view text) const;

  const std::string path_;
  OwnedFd file_;
  mutable std::mutex mutex_;
  std::string buffer_;
  std::uint64_t length_ = 0;  // of the file without its end
  std::uint64_t dropped_ = 0;
  bool any_ = false;  // event
  Status status_;
};

// As a JSON string, with its quotes.
[[nodiscard]] std::string json_quoted(std::string_view text);

}  // namespace terrace
