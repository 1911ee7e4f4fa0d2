#include "runtime/emulated/physical_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>

namespace terrace::emulated {

Result<std::unique_ptr<PhysicalMemory>> PhysicalMemory::create(Bytes capacity) {
  const int file = memfd_create("terrace-hbm", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(capacity.count())) != 0) {
    const int reason = errno;
    if (file >= 0) close(file);
    return Error{
        .code = Errc::kOutOfMemory,
        .text = "emulated device: no memory file of " + format_bytes(capacity) + ": " + std::strerror(reason),
        .bytes = capacity};
  }
  return std::unique_ptr<PhysicalMemory>(new PhysicalMemory(file, capacity));
}

PhysicalMemory::PhysicalMemory(int file, Bytes capacity)
    : file_(file), capacity_(capacity), length_(capacity.count()) {
  holes_.emplace(0, length_);
}

PhysicalMemory::~PhysicalMemory() { close(file_); }

Status PhysicalMemory::grow_to(std::uint64_t length) {
  if (ftruncate(file_, static_cast<off_t>(length)) != 0) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "emulated device: the memory file cannot grow to " + format_bytes(Bytes(length)) +
                         ": " + std::strerror(errno),
                 .bytes = Bytes(length)};
  }
  length_ = length;
  return {};
}

Result<PhysicalMemory::Range> PhysicalMemory::allocate(Bytes size) {
  const std::lock_guard lock(mutex_);
  if (size > capacity_ - live_) {
    return Error{.code = Errc::kOutOfMemory,
                 .text = "emulated device: " + format_bytes(size) + " asked for, " +
                         format_bytes(capacity_ - live_) + " of " + format_bytes(capacity_) + " free",
                 .bytes = size};
  }
  auto hole = holes_.begin();
  while (hole != holes_.end() && hole->second < size.count()) ++hole;
  if (hole == holes_.end()) {
    // Enough is free, but in pieces: lengthen the file by what its last hole lacks.
    std::uint64_t start = length_;
    if (!holes_.empty()) {
      const auto last = std::prev(holes_.end());
      if (last->first + last->second == length_) start = last->first;
    }
    if (Status grown = grow_to(start + size.count()); !grown.ok()) return grown.error();
    hole = holes_.insert_or_assign(start, size.count()).first;
  }
  const Range range{.offset = hole->first, .size = size};
  const std::uint64_t rest = hole->second - size.count();
  holes_.erase(hole);
  if (rest > 0) holes_.emplace(range.offset + size.count(), rest);
  live_ += size;
  return range;
}

void PhysicalMemory::free(Range range) {
  // The pages go back at once, and are zero when handed out again.
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(range.offset),
            static_cast<off_t>(range.size.count()));
  const std::lock_guard lock(mutex_);
  TERRACE_CHECK(range.size <= live_, "physical memory is freed once");
  std::uint64_t offset = range.offset;
  std::uint64_t length = range.size.count();
  auto after = holes_.lower_bound(offset);
  if (after != holes_.end() && offset + length == after->first) {
    length += after->second;
    after = holes_.erase(after);
  }
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      length += before->second;
      holes_.erase(before);
    }
  }
  holes_.emplace(offset, length);
  live_ -= range.size;
}

Bytes PhysicalMemory::live() const {
  const std::lock_guard lock(mutex_);
  return live_;
}

}  // namespace terrace::emulated
