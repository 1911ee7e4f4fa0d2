// What a service tells systemd, without its library: datagrams to the socket named by NOTIFY_SOCKET.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/owned_fd.hpp"

namespace terrace {

class ServiceNotice {
 public:
  // Nobody listens: every call does nothing.
  ServiceNotice() = default;
  // What the service manager has put into the environment, taken out of it, so that no child speaks for us.
  [[nodiscard]] static ServiceNotice from_environment();

  void ready() const { send("READY=1"); }
  void stopping() const { send("STOPPING=1"); }
  void alive() const { send("WATCHDOG=1"); }
  // One line for `systemctl status`.
  void status(std::string_view line) const { send("STATUS=" + std::string(line)); }
  // How often alive() is due: half of what the manager waits before it restarts us. None: no watchdog.
  [[nodiscard]] std::optional<std::chrono::milliseconds> alive_every() const { return alive_every_; }

 private:
  void send(const std::string& text) const;
  std::string address_;  // empty: nobody; "@name": abstract
  std::shared_ptr<const OwnedFd> socket_;
  std::optional<std::chrono::milliseconds> alive_every_;
};

}  // namespace terrace
