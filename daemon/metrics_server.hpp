// GET /metrics in the Prometheus text format and GET /healthz, over HTTP.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/registry.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/result.hpp"

namespace terrace {

class MetricsServer {
 public:
  // Serves what the collectables give, in order. `listen` is "ADDRESS:PORT"; port 0: any free one.
  // Errors: kIo (the port is taken, the address is not this machine's).
  [[nodiscard]] static Result<std::unique_ptr<MetricsServer>> open(
      const std::string& listen, std::vector<std::shared_ptr<prometheus::Collectable>> collectables);
  ~MetricsServer();  // waits for requests being served

  [[nodiscard]] const std::string& address() const;  // with the real port

 private:
  struct Impl;
  explicit MetricsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace terrace
