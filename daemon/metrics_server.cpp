#include "daemon/metrics_server.hpp"

#include <civetweb.h>
#include <prometheus/text_serializer.h>
#include <time.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>

#include "daemon/exposition.hpp"
#include "daemon/http_auth.hpp"
#include "daemon/http_front.hpp"
#include "daemon/now_json.hpp"
#include "daemon/page/page.hpp"

namespace terrace {
namespace {

// What Prometheus names for its text format.
constexpr const char* kMetricsType = "text/plain; version=0.0.4; charset=utf-8";
constexpr const char* kTextType = "text/plain; charset=utf-8";
constexpr std::size_t kMostSpareBuffers = 4;  // one a thread of the server
constexpr std::array kCodes = {200, 400, 401, 404, 405, 408, 413, 429, 500};

std::uint64_t thread_nanoseconds() {
  timespec spent{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
  return static_cast<std::uint64_t>(spent.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(spent.tv_nsec);
}

const char* reason_of(int code) {
  switch (code) {
    case 200:
      return "OK";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 413:
      return "Content Too Large";
    case 429:
      return "Too Many Requests";
    default:
      return code < 500 ? "Bad Request" : "Internal Server Error";
  }
}

struct Answer {
  int code = 200;
  const char* type = kTextType;
  std::string extra = {};  // header lines
};

struct HostAndPort {
  std::string host, port;
};
HostAndPort address_of(const std::string& listen) {
  const std::size_t colon = listen.rfind(':');
  if (colon == std::string::npos) return {"127.0.0.1", listen};
  return {listen.substr(0, colon), listen.substr(colon + 1)};
}

}  // namespace

struct MetricsServer::Impl {
  Impl(const Options& opened_with, ClientRegistry& clients,
       std::vector<std::shared_ptr<prometheus::Collectable>> collectables)
      : options(opened_with), registry(clients), own(std::move(collectables)), exposition(clients) {}
  ~Impl() { stop(); }

  Status start();
  Status listen(const HostAndPort& at);
  void stop();
  static int on_request(mg_connection* connection, void* server) {
    return static_cast<Impl*>(server)->serve(connection);
  }
  static int on_error(mg_connection* connection, int code, const char*) {
    auto* server = static_cast<Impl*>(mg_get_user_data(mg_get_context(connection)));
    server->send(connection, {.code = code}, "refused: not a request that is served here\n");
    return 0;
  }
  int serve(mg_connection* connection);
  void send(mg_connection* connection, const Answer& answer, std::string_view body);
  void send_metrics(mg_connection* connection);
  void count(int code);
  void append_own(std::string& text);
  [[nodiscard]] std::optional<Answer> refuse(const mg_request_info& request);

  const Options options;
  ClientRegistry& registry;
  std::vector<std::shared_ptr<prometheus::Collectable>> own;
  Exposition exposition;
  std::optional<HttpAuth> auth;
  std::string own_host;  // where the HTTP library listens
  int own_port = 0;
  std::unique_ptr<HttpFront> front;  // null: neither TLS nor IPv6
  std::string address;
  mg_context* context = nullptr;
  std::mutex mutex;
  std::vector<std::string> spare;  // buffers of earlier scrapes
  std::array<std::atomic<std::uint64_t>, kCodes.size()> answered{};
  std::atomic<std::uint64_t> scrapes{0}, scrape_nanoseconds{0};
};

Status MetricsServer::Impl::start() {
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    return Error{Errc::kInvalidArgument,
                 "metrics.tls_cert and metrics.tls_key go together; name both PEM files, or neither"};
  }
  if (!options.auth_file.empty()) {
    auto loaded = HttpAuth::load(options.auth_file);
    if (!loaded) return loaded.error();
    auth.emplace(std::move(*loaded));
  }
  const HostAndPort wanted = address_of(options.listen);
  const bool fronted = !options.tls_cert.empty() || wanted.host.starts_with('[');
  if (Status listening = listen(fronted ? HostAndPort{"127.0.0.1", "0"} : wanted); !listening || !fronted)
    return listening;
  auto opened = HttpFront::open({.host = wanted.host,
                                 .port = wanted.port,
                                 .cert = options.tls_cert,
                                 .key = options.tls_key,
                                 .upstream = static_cast<std::uint16_t>(own_port)});
  if (!opened) return opened.error();
  front = std::move(*opened);
  address = wanted.host + ":" + std::to_string(front->port());
  return {};
}

Status MetricsServer::Impl::listen(const HostAndPort& at) {
  mg_init_library(0);
  const std::string ports = at.host + ":" + at.port;
  const std::array settings = {"listening_ports",
                               ports.c_str(),
                               "num_threads",
                               "4",
                               "request_timeout_ms",
                               "5000",
                               "max_request_size",
                               "8192",
                               "enable_directory_listing",
                               "no",
                               "tcp_nodelay",
                               "1",
                               "access_control_allow_origin",
                               "",
                               "access_control_allow_methods",
                               "",
                               static_cast<const char*>(nullptr)};
  mg_callbacks callbacks{};
  callbacks.http_error = on_error;
  context = mg_start(&callbacks, this, const_cast<const char**>(settings.data()));
  if (context == nullptr) {
    return Error{Errc::kIo,
                 "cannot listen on " + options.listen +
                     ": the port is taken or the address is not this machine's; choose another with "
                     "--listen or metrics.listen"};
  }
  std::array<mg_server_port, 1> bound{};
  const int found = mg_get_server_ports(context, static_cast<int>(bound.size()), bound.data());
  own_host = at.host;
  own_port = found == 1 ? bound[0].port : 0;
  address = own_host + ":" + std::to_string(own_port);
  mg_set_request_handler(context, "/", on_request, this);
  return {};
}

// Civetweb looks whether it shall stop only when its listening socket wakes it, or every two seconds: it is
// knocked at until it has gone.
void MetricsServer::Impl::stop() {
  front.reset();
  if (context == nullptr) return;
  std::atomic<bool> gone{false};
  std::thread knocking([&] {
    char why[128];
    while (!gone) {
      mg_connection* knock = mg_connect_client(own_host.c_str(), own_port, 0, why, sizeof why);
      if (knock != nullptr) mg_close_connection(knock);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  mg_stop(std::exchange(context, nullptr));
  gone = true;
  knocking.join();
}

void MetricsServer::Impl::count(int code) {
  std::size_t at = 0;
  while (at + 1 < kCodes.size() && kCodes[at] != code) ++at;
  answered[at].fetch_add(1, std::memory_order_relaxed);
}

void MetricsServer::Impl::send(mg_connection* connection, const Answer& answer, std::string_view body) {
  count(answer.code);
  const mg_request_info* request = mg_get_request_info(connection);
  const bool head = request != nullptr && request->request_method != nullptr &&
                    std::string_view(request->request_method) == "HEAD";
  std::string text =
      "HTTP/1.1 " + std::to_string(answer.code) + " " + reason_of(answer.code) +
      "\r\nContent-Type: " + answer.type + "\r\nContent-Length: " + std::to_string(body.size()) +
      "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n" +
      "Cross-Origin-Resource-Policy: same-origin\r\n" + answer.extra + "Connection: close\r\n\r\n";
  constexpr std::size_t kTogether = 4096;  // a small body travels with its header
  if (!head && body.size() <= kTogether) text += body;
  mg_write(connection, text.data(), text.size());
  if (!head && body.size() > kTogether) mg_write(connection, body.data(), body.size());
}

void MetricsServer::Impl::append_own(std::string& text) {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& collectable : own) {
    auto some = collectable->Collect();
    families.insert(families.end(), std::make_move_iterator(some.begin()),
                    std::make_move_iterator(some.end()));
  }
  const auto family = [](NodeMetric metric) {
    const NodeMetricInfo& info = node_metric_table()[static_cast<std::size_t>(metric)];
    prometheus::MetricFamily made;
    made.name = info.name;
    made.help = info.help;
    made.type = prometheus::MetricType::Counter;
    return made;
  };
  const auto add = [](prometheus::MetricFamily& to, std::vector<prometheus::ClientMetric::Label> labels,
                      double value) {
    prometheus::ClientMetric sample;
    sample.label = std::move(labels);
    sample.counter.value = value;
    to.metric.push_back(std::move(sample));
  };
  auto requests = family(NodeMetric::kHttpRequests);
  for (std::size_t i = 0; i < kCodes.size(); ++i)
    add(requests, {{"code", std::to_string(kCodes[i])}}, static_cast<double>(answered[i].load()));
  auto counted = family(NodeMetric::kScrapes);
  add(counted, {}, static_cast<double>(scrapes.load()));
  auto seconds = family(NodeMetric::kScrapeSeconds);
  add(seconds, {}, static_cast<double>(scrape_nanoseconds.load()) / 1e9);
  for (auto* made : {&requests, &counted, &seconds}) families.push_back(std::move(*made));
  text += prometheus::TextSerializer().Serialize(families);
}

void MetricsServer::Impl::send_metrics(mg_connection* connection) {
  const std::uint64_t began = thread_nanoseconds();
  std::string text;
  {
    const std::lock_guard lock(mutex);
    if (!spare.empty()) {
      text = std::move(spare.back());
      spare.pop_back();
    }
  }
  text.clear();
  exposition.write(text);
  append_own(text);
  send(connection, {.type = kMetricsType}, text);
  scrapes.fetch_add(1, std::memory_order_relaxed);
  scrape_nanoseconds.fetch_add(thread_nanoseconds() - began, std::memory_order_relaxed);
  const std::lock_guard lock(mutex);
  if (spare.size() < kMostSpareBuffers) spare.push_back(std::move(text));
}

// Nothing where the request may be served.
std::optional<Answer> MetricsServer::Impl::refuse(const mg_request_info& request) {
  const std::string_view method(request.request_method);
  if (method != "GET" && method != "HEAD") return Answer{.code = 405, .extra = "Allow: GET, HEAD\r\n"};
  if (!auth || std::string_view(request.local_uri) == "/healthz") return std::nullopt;
  const char* credentials = nullptr;
  for (int i = 0; i < request.num_headers; ++i) {
    if (::strcasecmp(request.http_headers[i].name, "Authorization") == 0)
      credentials = request.http_headers[i].value;
  }
  switch (auth->check(credentials)) {
    case HttpAuth::Answer::kAllowed:
      return std::nullopt;
    case HttpAuth::Answer::kTooMany:
      return Answer{.code = 429, .extra = "Retry-After: 1\r\n"};
    case HttpAuth::Answer::kDenied:
      break;
  }
  return Answer{.code = 401, .extra = "WWW-Authenticate: Basic realm=\"terrace\", charset=\"UTF-8\"\r\n"};
}

int MetricsServer::Impl::serve(mg_connection* connection) {
  const mg_request_info& request = *mg_get_request_info(connection);
  const std::string_view path = request.local_uri == nullptr ? "" : request.local_uri;
  if (const auto refused = refuse(request)) {
    send(connection, *refused, std::string(reason_of(refused->code)) + "\n");
    return refused->code;
  }
  if (path == "/metrics") {
    send_metrics(connection);
  } else if (path == "/healthz") {
    send(connection, {}, "ok\n");
  } else if (path == "/api/v1/now") {
    const double now =
        std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
    send(connection, {.type = "application/json"},
         now_json(registry.view(ClientRegistry::Ended::kLeftOut), options.version, now));
  } else if (path == "/") {
    const EmbeddedPage page = embedded_page();
    send(connection,
         {.type = "text/html; charset=utf-8",
          .extra = std::string("Content-Security-Policy: ") + page.content_security_policy +
                   "\r\nReferrer-Policy: no-referrer\r\n"},
         page.html);
  } else {
    send(connection, {.code = 404}, "not found; served are /, /metrics, /api/v1/now and /healthz\n");
    return 404;
  }
  return 200;
}

Result<std::unique_ptr<MetricsServer>> MetricsServer::open(
    const Options& options, ClientRegistry& registry,
    std::vector<std::shared_ptr<prometheus::Collectable>> own) {
  auto impl = std::make_unique<Impl>(options, registry, std::move(own));
  if (Status started = impl->start(); !started) return started.error();
  return std::unique_ptr<MetricsServer>(new MetricsServer(std::move(impl)));
}

MetricsServer::MetricsServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsServer::~MetricsServer() = default;
const std::string& MetricsServer::address() const { return impl_->address; }

}  // namespace terrace
