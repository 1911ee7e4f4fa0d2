// The daemon's place on a node: a listening Unix socket that exactly one live daemon has.
//
// Beside the socket lies PATH.lock, held by flock for as long as the daemon lives, however it ends. Whoever
// has the lock may replace a socket that a killed predecessor has left.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace {

class SocketClaim {
 public:
  struct Access {
    mode_t mode = 0600;
    std::optional<gid_t> group;  // that the socket belongs to
  };
  // Makes missing folders of the path. Errors: kIo (another daemon lives there, the path is something else
  // than a socket, no permission), kInvalidArgument (the path is too long). The text says what to do.
  [[nodiscard]] static Result<SocketClaim> claim(const std::string& path, const Access& access);
  [[nodiscard]] static Result<SocketClaim> claim(const std::string& path);  // for the owner alone
  // Errors: kIo; then the owner alone may connect.
  [[nodiscard]] Status open_to(const Access& access) const;
  SocketClaim(SocketClaim&&) noexcept = default;
  SocketClaim& operator=(SocketClaim&&) = delete;
  ~SocketClaim();  // removes the socket unless it is left behind, lets go of the lock

  [[nodiscard]] int fd() const { return listening_.get(); }  // non-blocking
  [[nodiscard]] const std::string& path() const { return path_; }
  // For the successor to know that clients of this daemon live on and will come back with what they hold.
  void leave_behind() { leave_behind_ = true; }
  // A predecessor was killed, or left its clients: they may come back with what they hold.
  [[nodiscard]] bool replaced_stale() const { return replaced_stale_; }

 private:
  SocketClaim(std::string path, OwnedFd lock) : path_(std::move(path)), lock_(std::move(lock)) {}
  std::string path_;
  OwnedFd lock_;
  OwnedFd listening_;
  bool replaced_stale_ = false;
  bool leave_behind_ = false;
};

}  // namespace terrace
