#include "daemon/peer.hpp"

#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace terrace {
namespace {

#ifndef SO_PEERGROUPS
constexpr int SO_PEERGROUPS = 59;
#endif

constexpr std::size_t kMostGroups = 65536;  // NGROUPS_MAX

std::vector<gid_t> groups_of(int socket) {
  std::vector<gid_t> groups(64);
  for (;;) {
    auto size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) == 0) {
      groups.resize(size / sizeof(gid_t));
      return groups;
    }
    if (errno != ERANGE || groups.size() >= kMostGroups) return {};
    groups.resize(
        std::min<std::size_t>(std::max<std::size_t>(size / sizeof(gid_t), 2 * groups.size()), kMostGroups));
  }
}

bool member(const Peer& peer, const std::optional<gid_t>& group) {
  return group && (peer.gid == *group ||
                   std::find(peer.groups.begin(), peer.groups.end(), *group) != peer.groups.end());
}

}  // namespace

Result<Peer> peer_of(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    return Error{Errc::kIo, std::string("who connected is not known: ") + std::strerror(errno)};
  Peer peer;
  peer.pid = credentials.pid;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  peer.groups = groups_of(socket);
  if (peer.pid <= 0) return peer;
  peer.process = OwnedFd(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
  // Its end would not be noticed where a child keeps the socket open. An old kernel has no such handles.
  if (!peer.process.valid() && errno != ENOSYS && errno != EPERM)
    return Error{Errc::kIo, std::string("no handle of who connected: ") + std::strerror(errno)};
  return peer;
}

std::string user_name(uid_t uid) {
  std::array<char, 4096> buffer;
  passwd entry{};
  passwd* found = nullptr;
  if (::getpwuid_r(uid, &entry, buffer.data(), buffer.size(), &found) == 0 && found != nullptr)
    return found->pw_name;
  return std::to_string(uid);
}

Result<gid_t> group_named(const std::string& name, const char* key) {
  std::array<char, 16384> buffer;
  group entry{};
  group* found = nullptr;
  if (::getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found) == 0 && found != nullptr)
    return found->gr_gid;
  return Error{Errc::kInvalidArgument, std::string(key) + ": this machine has no group \"" + name +
                                           "\"; `getent group` lists them, `groupadd` makes one"};
}

mode_t AccessRules::socket_mode() const {
  if (readers || everybody_reads) return 0666;
  return group ? 0660 : 0600;
}

Right right_of(const Peer& peer, const AccessRules& rules) {
  if (peer.uid == 0 || peer.uid == rules.owner) return Right::kOwn;
  if (member(peer, rules.group)) return Right::kRegister;
  return rules.everybody_reads || member(peer, rules.readers) ? Right::kRead : Right::kNone;
}

}  // namespace terrace
