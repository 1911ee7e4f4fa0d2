// Who is at the other end of a socket, as the kernel says, and what the daemon lets them do.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/owned_fd.hpp"
#include "runtime/result.hpp"

namespace terrace {

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // beside gid
  // A pidfd: says when the process has ended, also where a forked child keeps the socket open.
  OwnedFd process;
};
// Who connected, when it did. Errors: kIo (the kernel does not tell, the process has ended, no descriptor is
// left: not served).
[[nodiscard]] Result<Peer> peer_of(int socket);

// The name of a user, or the number where it has none.
[[nodiscard]] std::string user_name(uid_t uid);
// Errors: kInvalidArgument (no such group; the text names `key`, which asked for it).
[[nodiscard]] Result<gid_t> group_named(const std::string& name, const char* key);

// Each includes those before it.
enum class Right : std::uint8_t {
  kNone,
  kRead,      // the node's totals
  kRegister,  // processes of one's own: to register, to see, to switch off
  kOwn,       // every process, and the policy
};

struct AccessRules {
  uid_t owner = 0;             // and root
  std::optional<gid_t> group;  // whose members may register
  std::optional<gid_t> readers;
  bool everybody_reads = false;
  // Of the socket, so that the kernel refuses whom the daemon would.
  [[nodiscard]] mode_t socket_mode() const;
};
[[nodiscard]] Right right_of(const Peer& peer, const AccessRules& rules);

}  // namespace terrace
