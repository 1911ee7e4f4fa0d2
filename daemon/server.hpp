// terraced without its command line: one thread that answers the socket, and the metrics over HTTP beside it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "daemon/client_registry.hpp"
#include "daemon/peer.hpp"
#include "daemon/service_notice.hpp"
#include "runtime/result.hpp"

namespace terrace {

class Server {
 public:
  // What a reload changes.
  struct Live {
    ClientRegistry::Limits limits;
    AccessRules access;
  };
  struct Options {
    std::string socket;
    std::string listen;                        // "127.0.0.1:9464"; port 0: any; empty: no HTTP
    std::string tls_cert, tls_key, auth_file;  // as MetricsServer::Options
    ClientRegistry::Options registry;
    AccessRules access;                                       // the owner is whoever runs the daemon
    std::function<Result<Live>()> reread;                     // the policy, anew; empty: a reload is refused
    std::optional<std::chrono::milliseconds> exit_when_idle;  // nobody connected for so long: run() ends
    // After a predecessor was killed: for so long lease requests wait, so that its clients come back with
    // what they hold before anyone is granted it.
    std::chrono::milliseconds rejoin_grace{1500};
    ServiceNotice notice;
  };
  // Claims the socket and the port. Errors: one line for a person, as SocketClaim and MetricsServer say.
  [[nodiscard]] static Result<std::unique_ptr<Server>> open(Options options);
  ~Server();

  // Serves until stop() or idleness. Errors: kIo (epoll failed: a programmer error or no memory).
  [[nodiscard]] Status run();
  // From any thread and from signal handlers: ends run(); reads the policy anew, and logs what came of it.
  void stop() noexcept;
  void reload() noexcept;

  [[nodiscard]] const std::string& listen_address() const;  // with the real port; empty: none
  [[nodiscard]] ClientRegistry& registry();

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
