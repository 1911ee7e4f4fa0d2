// The daemon over HTTP or HTTPS: GET /metrics in the Prometheus text format, / the page that shows it,
// /api/v1/now what the page reads (now_json.hpp), /healthz "ok" for whoever asks.
//
// Only GET and HEAD are answered, and nothing of a request but its path, its method and its credentials is
// looked at. A request of more than 8 KiB is refused. With TLS the HTTP library listens on a port of its own
// on the loopback, in the clear, behind the one that is asked for (http_front.hpp).
#pragma once

#include <prometheus/collectable.h>

#include <memory>
#include <string>
#include <vector>

#include "daemon/client_registry.hpp"
#include "runtime/result.hpp"

namespace terrace {

class MetricsServer {
 public:
  struct Options {
    std::string listen{};               // "ADDRESS:PORT"; port 0: any free one
    std::string tls_cert{}, tls_key{};  // PEM files, both or neither
    std::string auth_file{};            // see http_auth.hpp; empty: whoever reaches the address may read
    std::string version{};
  };
  // Serves the registry, and after it what the collectables give, in order. The registry outlives the server.
  // Errors, one line: kIo (the port is taken, the address is not this machine's, a file is unreadable),
  // kInvalidArgument (a certificate without its key, a bad line in the auth file).
  [[nodiscard]] static Result<std::unique_ptr<MetricsServer>> open(
      const Options& options, ClientRegistry& registry,
      std::vector<std::shared_ptr<prometheus::Collectable>> own);
  ~MetricsServer();  // waits for requests being served

  [[nodiscard]] const std::string& address() const;  // with the real port

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
