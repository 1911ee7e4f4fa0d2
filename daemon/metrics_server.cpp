#include "daemon/metrics_server.hpp"

#include <CivetServer.h>
#include <prometheus/text_serializer.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <thread>

namespace terrace {
namespace {

bool answer(mg_connection* connection, const std::string& body) {
  // The content type is the one that Prometheus names for its text format.
  mg_printf(connection,
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            "Content-Length: %zu\r\nConnection: close\r\n\r\n",
            body.size());
  mg_write(connection, body.data(), body.size());
  return true;
}

class MetricsHandler final : public CivetHandler {
 public:
  explicit MetricsHandler(std::vector<std::shared_ptr<prometheus::Collectable>> collectables)
      : collectables_(std::move(collectables)) {}
  bool handleGet(CivetServer*, mg_connection* connection) override {
    std::vector<prometheus::MetricFamily> families;
    for (const auto& collectable : collectables_) {
      auto some = collectable->Collect();
      families.insert(families.end(), std::make_move_iterator(some.begin()),
                      std::make_move_iterator(some.end()));
    }
    return answer(connection, prometheus::TextSerializer().Serialize(families));
  }

 private:
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables_;
};

class HealthHandler final : public CivetHandler {
 public:
  bool handleGet(CivetServer*, mg_connection* connection) override { return answer(connection, "ok\n"); }
};

}  // namespace

struct MetricsServer::Impl {
  explicit Impl(std::vector<std::shared_ptr<prometheus::Collectable>> collectables)
      : metrics(std::move(collectables)) {}
  ~Impl() { stop(); }

  // Civetweb looks whether it shall stop only when its listening socket wakes it, or every two seconds: it is
  // knocked at until it has gone.
  void stop() {
    if (!server) return;
    std::atomic<bool> gone{false};
    std::thread knocking([&] {
      const std::size_t colon = address.rfind(':');
      char why[128];
      while (!gone) {
        mg_connection* knock = mg_connect_client(address.substr(0, colon).c_str(),
                                                 std::atoi(address.c_str() + colon + 1), 0, why, sizeof why);
        if (knock != nullptr) mg_close_connection(knock);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    });
    server.reset();
    gone = true;
    knocking.join();
  }

  MetricsHandler metrics;
  HealthHandler health;
  std::string address;
  std::unique_ptr<CivetServer> server;
};

Result<std::unique_ptr<MetricsServer>> MetricsServer::open(
    const std::string& listen, std::vector<std::shared_ptr<prometheus::Collectable>> collectables) {
  auto impl = std::make_unique<Impl>(std::move(collectables));
  const std::size_t colon = listen.rfind(':');
  const std::string host = colon == std::string::npos ? "127.0.0.1" : listen.substr(0, colon);
  const std::string port = colon == std::string::npos ? listen : listen.substr(colon + 1);
  try {
    impl->server = std::make_unique<CivetServer>(
        std::vector<std::string>{"listening_ports", host + ":" + port, "num_threads", "2",
                                 "request_timeout_ms", "10000", "enable_directory_listing", "no"});
    const std::vector<int> ports = impl->server->getListeningPorts();
    impl->address = host + ":" + std::to_string(ports.empty() ? 0 : ports.front());
    impl->server->addHandler("/metrics", impl->metrics);
    impl->server->addHandler("/healthz", impl->health);
  } catch (const CivetException&) {
    return Error{Errc::kIo,
                 "cannot listen on " + listen +
                     ": the port is taken or the address is not this machine's; choose another with "
                     "--listen or metrics.listen"};
  }
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;
const std::string& MetricsServer::address() const { return impl_->address; }

}  // namespace terrace
