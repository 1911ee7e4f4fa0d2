#include "daemon/socket_claim.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "runtime/wire.hpp"

namespace terrace {
namespace {

constexpr int kBacklog = 64;

Error cannot(const std::string& path, const char* what) {
  return Error{Errc::kIo, "socket " + path + ": cannot " + what + ": " + std::strerror(errno) +
                              "; choose another with --socket or daemon.socket"};
}

}  // namespace

Result<SocketClaim> SocketClaim::claim(const std::string& path) { return claim(path, Access()); }

Result<SocketClaim> SocketClaim::claim(const std::string& path, const Access& access) {
  const auto address = WireAddress::of(path);
  if (!address) return address.error();
  std::error_code ignored;  // a folder that can't be made shows when the lock is opened
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
  OwnedFd lock(::open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return cannot(path, "open its lock file");
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return Error{Errc::kIo,
                 "socket " + path + " is taken by another daemon; stop it or choose another --socket"};
  }
  SocketClaim claim(path, std::move(lock));
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0) {
    if (!S_ISSOCK(status.st_mode)) {
      claim.path_.clear();  // not ours to remove
      return Error{Errc::kIo, path + " exists and is not a socket; choose another --socket"};
    }
    claim.replaced_stale_ = true;
    if (::unlink(path.c_str()) != 0) return cannot(path, "replace the stale socket");
  }
  claim.listening_ = OwnedFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!claim.listening_.valid()) return cannot(path, "make a socket");
  const auto* target = reinterpret_cast<const sockaddr*>(address->storage.data());
  // The file begins with the mode of the descriptor: nobody slips in before it is widened.
  if (::fchmod(claim.fd(), 0600) != 0) return cannot(path, "make a private socket");
  if (::bind(claim.fd(), target, address->size) != 0) return cannot(path, "bind");
  if (Status opened = claim.open_to(access); !opened) return opened.error();
  if (::listen(claim.fd(), kBacklog) != 0) return cannot(path, "listen");
  return claim;
}

Status SocketClaim::open_to(const Access& access) const {
  if (::chmod(path_.c_str(), 0600) != 0) return cannot(path_, "set its mode");
  if (access.group && ::chown(path_.c_str(), static_cast<uid_t>(-1), *access.group) != 0)
    return cannot(path_, "give it to the group of daemon.group");
  if (::chmod(path_.c_str(), access.mode) != 0) return cannot(path_, "set its mode");
  return {};
}

SocketClaim::~SocketClaim() {
  if (lock_.valid() && !path_.empty() && !leave_behind_) ::unlink(path_.c_str());
}

}  // namespace terrace
