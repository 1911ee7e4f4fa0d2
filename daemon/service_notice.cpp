#include "daemon/service_notice.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace terrace {
namespace {

std::string taken_from_environment(const char* name) {
  const char* value = std::getenv(name);
  std::string text = value == nullptr ? "" : value;
  ::unsetenv(name);
  return text;
}

}  // namespace

ServiceNotice ServiceNotice::from_environment() {
  ServiceNotice notice;
  const std::string address = taken_from_environment("NOTIFY_SOCKET");
  const std::string microseconds = taken_from_environment("WATCHDOG_USEC");
  const std::string watched = taken_from_environment("WATCHDOG_PID");
  const bool usable = address.size() > 1 && address.size() < sizeof(sockaddr_un::sun_path) &&
                      (address.front() == '/' || address.front() == '@');
  if (!usable) return notice;
  notice.socket_ = std::make_shared<OwnedFd>(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  notice.address_ = address;
  const auto patience = std::strtoull(microseconds.c_str(), nullptr, 10) / 1000;
  const bool ours = watched.empty() || std::strtol(watched.c_str(), nullptr, 10) == ::getpid();
  if (patience > 1 && ours) notice.alive_every_ = std::chrono::milliseconds(patience / 2);
  return notice;
}

void ServiceNotice::send(const std::string& text) const {
  if (address_.empty() || !socket_->valid()) return;
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  address_.copy(to.sun_path, sizeof to.sun_path - 1);
  if (to.sun_path[0] == '@') to.sun_path[0] = '\0';
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address_.size());
  // A manager that does not listen is no reason to do anything else.
  [[maybe_unused]] const ssize_t sent =
      ::sendto(socket_->get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
               reinterpret_cast<const sockaddr*>(&to), size);
}

}  // namespace terrace
