#include "runtime/timeline/trace_event_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace terrace {
namespace {
constexpr std::string_view kHead = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
}

std::string json_quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      quoted += escape;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

Result<std::unique_ptr<TraceEventFile>> TraceEventFile::create(const std::string& path) {
  OwnedFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.valid()) {
    return Error{
        .code = Errc::kIo,
        .text = path + ": cannot write the timeline: " + std::strerror(errno) + "; name another file"};
  }
  std::unique_ptr<TraceEventFile> created(new TraceEventFile(std::move(file), path));
  created->buffer_ = kHead;
  created->write_out();
  if (!created->status_) return created->status_.error();
  return created;
}

TraceEventFile::~TraceEventFile() { flush(); }

void TraceEventFile::add(std::string_view event) {
  const std::lock_guard lock(mutex_);
  if (length_ + buffer_.size() + event.size() > kMostBytes || !status_) {
    ++dropped_;
    return;
  }
  buffer_ += any_ ? ",\n" : "\n";
  buffer_ += event;
  any_ = true;
  if (buffer_.size() >= kBuffer) write_out();
}

void TraceEventFile::flush() {
  const std::lock_guard lock(mutex_);
  write_out();
}

void TraceEventFile::count_dropped() {
  const std::lock_guard lock(mutex_);
  ++dropped_;
}

Status TraceEventFile::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

// All of it at that place. False: errno says why not.
bool TraceEventFile::write_at(std::uint64_t place, std::string_view text) const {
  while (!text.empty()) {
    const ssize_t wrote = ::pwrite(file_.get(), text.data(), text.size(), static_cast<off_t>(place));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(wrote));
    place += static_cast<std::uint64_t>(wrote);
  }
  return true;
}

// The new end is at least as far as the old one: nothing of that is left behind it.
void TraceEventFile::write_out() {
  if (!status_) return;
  const std::uint64_t events = buffer_.size();
  const std::string end = "\n],\"otherData\":{\"dropped_events\":" + std::to_string(dropped_) + "}}\n";
  buffer_ += end;
  if (write_at(length_, buffer_)) {
    length_ += events;
  } else {
    status_ = Error{.code = Errc::kIo,
                    .text = path_ + ": cannot write the timeline: " + std::strerror(errno) +
                            "; check the space on the disk"};
    // As it was: there was room for that.
    if (::ftruncate(file_.get(), static_cast<off_t>(length_)) == 0 && length_ > 0)
      (void)write_at(length_, end);
  }
  buffer_.clear();
}

}  // namespace terrace
