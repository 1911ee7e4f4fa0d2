#include "runtime/trace/recording_file.hpp"

#include <fcntl.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "runtime/fault.hpp"

namespace terrace::trace {
namespace {

constexpr mode_t kMode = 0666;  // less the umask

// Whose lock it is. A holder that has not come to its header yet counts as the furthest.
bool held_by_at_least(int fd, Layer layer) {
  std::uint8_t holder = 0;
  return pread(fd, &holder, 1, kLayerOffset) == 1 && holder >= static_cast<std::uint8_t>(layer);
}

}  // namespace

RecordingFile::Outcome RecordingFile::open(const char* path, Layer layer) noexcept {
  fd_ = ::open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOCTTY, kMode);
  if (fd_ < 0) return Outcome::kFailed;
  // Where a file system has no locks, nobody else can be told from us: go on.
  if (flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    const bool theirs = held_by_at_least(fd_, layer);
    close();
    return theirs || layer == Layer::kDriverCalls ? Outcome::kTaken : replace(path);
  }
  if (ftruncate(fd_, 0) == 0 && remember()) return Outcome::kDone;
  const int reason = errno;
  close();
  errno = reason;
  return Outcome::kFailed;
}

RecordingFile::Outcome RecordingFile::replace(const char* path) noexcept {
  char fresh[PATH_MAX];
  const int length = std::snprintf(fresh, sizeof fresh, "%s.%d.new", path, static_cast<int>(getpid()));
  if (length < 0 || static_cast<std::size_t>(length) >= sizeof fresh) {
    errno = ENAMETOOLONG;
    return Outcome::kFailed;
  }
  (void)unlink(fresh);
  fd_ = ::open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  if (fd_ < 0) return Outcome::kFailed;
  (void)flock(fd_, LOCK_EX | LOCK_NB);
  const bool refused = fault_point(FaultPoint::kFileRename);
  if (!refused && rename(fresh, path) == 0 && remember()) return Outcome::kDone;
  const int reason = refused ? EIO : errno;
  (void)unlink(fresh);
  close();
  errno = reason;
  return Outcome::kFailed;
}

bool RecordingFile::remember() noexcept {
  struct stat now {};
  if (fstat(fd_, &now) != 0) return false;
  device_ = now.st_dev;
  inode_ = now.st_ino;
  return true;
}

// A program that closes every descriptor it does not know may have opened something else under our number.
bool RecordingFile::still_ours() const noexcept {
  struct stat now {};
  return fstat(fd_, &now) == 0 && now.st_dev == device_ && now.st_ino == inode_;
}

RecordingFile::Outcome RecordingFile::write(std::span<const std::byte> bytes) noexcept {
  if (!still_ours()) {
    fd_ = -1;  // not ours to close
    errno = EBADF;
    return Outcome::kFailed;
  }
  struct stat now {};
  const bool known = fstat(fd_, &now) == 0;
  if (known && now.st_nlink == 0) {
    close();
    return Outcome::kTaken;
  }
  // A write beyond the limit would be answered with a signal that ends the guest.
  rlimit most{};
  if (known && getrlimit(RLIMIT_FSIZE, &most) == 0 &&
      most.rlim_cur < static_cast<rlim_t>(now.st_size) + bytes.size()) {
    close();
    errno = EFBIG;
    return Outcome::kFailed;
  }
  while (!bytes.empty()) {
    if (fault_point(FaultPoint::kFileWrite)) {
      errno = EIO;
      break;
    }
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) break;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  if (bytes.empty()) return Outcome::kDone;
  const int reason = errno;
  close();
  errno = reason;
  return Outcome::kFailed;
}

void RecordingFile::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace terrace::trace
