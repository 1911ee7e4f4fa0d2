#include "daemon/record_target.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "runtime/owned_fd.hpp"
#include "runtime/trace/format.hpp"

namespace terrace {

Status prepare_record_target(const std::string& file) {
  const auto refuse = [&](Errc code, const std::string& why) {
    return Error{.code = code, .text = "--record " + file + ": " + why};
  };
  struct stat info {};
  if (::stat(file.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return refuse(Errc::kIo, "no plain file; name one in a folder that you may write");
  }
  const OwnedFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!fd.valid())
    return refuse(Errc::kIo, std::string(std::strerror(errno)) + "; name a file that you may write");
  // A recorder holds a lock on its file (runtime/trace/recording_file.hpp).
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return refuse(Errc::kInvalidArgument, "a running process is recording into it; name another file");
  }
  std::array<unsigned char, trace::kMagic.size()> head{};
  const ssize_t begins = ::pread(fd.get(), head.data(), head.size(), 0);
  if (begins > 0 && !std::equal(head.begin(), head.begin() + begins, trace::kMagic.begin())) {
    return refuse(Errc::kInvalidArgument, "it is no trace, and would be overwritten; name another file");
  }
  if (::ftruncate(fd.get(), 0) != 0) return refuse(Errc::kIo, std::strerror(errno));
  return {};
}

std::string record_notice(const std::string& file) {
  struct stat info {};
  if (::stat(file.c_str(), &info) == 0 && info.st_size > 0) return {};
  return "terrace: nothing was recorded in " + file +
         ": the command made no allocation that Terrace sees; what processes it started recorded is in " +
         file + ".PID\n";
}

}  // namespace terrace
