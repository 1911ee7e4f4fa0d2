#include "daemon/server.hpp"

#include <poll.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>

#include "daemon/exposition.hpp"
#include "daemon/metrics_server.hpp"
#include "daemon/socket_claim.hpp"
#include "daemon/status_json.hpp"
#include "daemon/version.hpp"
#include "runtime/wire.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using WallClock = std::chrono::steady_clock;

constexpr std::size_t kMaxConnections = 1024;
constexpr std::uint64_t kListening = 0;  // epoll tags; connections count from kFirstConnection
constexpr std::uint64_t kStop = 1;
constexpr std::uint64_t kFirstConnection = 2;

struct Connection {
  WireConnection wire;
  OwnedFd process;  // a pidfd: says when the peer has ended, also where a forked child keeps the socket open
  pid_t peer = 0;
  bool greeted = false;
  std::optional<ClientId> client;  // an observer has none
  std::optional<std::pair<std::uint32_t, LeaseRequest>>
      waiting;  // sequence and request, until the grace ends
};

pid_t peer_of(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 ? credentials.pid : 0;
}

OwnedFd process_handle(pid_t pid) {
  return OwnedFd(pid > 0 ? static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)) : -1);
}

TierBytes wire_amounts(const TierAmounts& amounts) {
  TierBytes bytes{};
  for (std::size_t tier = 0; tier < kTierCount; ++tier) bytes[tier] = amounts[tier].count();
  return bytes;
}

}  // namespace

struct Server::Impl {
  Impl(Options opened_with, SocketClaim claimed)
      : options(std::move(opened_with)), claim(std::move(claimed)), clients(options.registry) {}

  Options options;
  SocketClaim claim;
  ClientRegistry clients;
  std::shared_ptr<prometheus::Registry> own = std::make_shared<prometheus::Registry>();
  prometheus::Counter* refused = nullptr;
  std::unique_ptr<MetricsServer> http;
  DaemonFacts facts;
  OwnedFd epoll{::epoll_create1(EPOLL_CLOEXEC)};
  OwnedFd stop{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::map<std::uint64_t, Connection> connections;
  std::uint64_t next_tag = kFirstConnection;
  WallClock::time_point grace_ends{};
  WallClock::time_point idle_since{};

  Status prepare();
  bool watch(int fd, std::uint64_t tag);
  void accept_all();
  void accept_one(OwnedFd socket);
  void serve(std::uint64_t tag);
  void drop(std::uint64_t tag);
  void refuse(std::uint64_t tag, const Error& error, std::uint32_t sequence);
  void answer(std::uint64_t tag, Envelope& envelope);
  void greet(std::uint64_t tag, Envelope& envelope, const Hello& hello);
  void lease(std::uint64_t tag, std::uint32_t sequence, const LeaseRequest& request);
  void reply(std::uint64_t tag, const Message& message, std::uint32_t sequence);
  void serve_waiting();
  [[nodiscard]] bool in_grace() const { return WallClock::now() < grace_ends; }
  [[nodiscard]] bool idle_for_long();
  [[nodiscard]] milliseconds patience() const;
  Status loop();
};

Status Server::Impl::prepare() {
  if (!epoll.valid() || !stop.valid() || !watch(claim.fd(), kListening) || !watch(stop.get(), kStop)) {
    return Error{Errc::kIo, std::string("epoll: ") + std::strerror(errno)};
  }
  const NodeMetricInfo& refused_info =
      node_metric_table()[static_cast<std::size_t>(NodeMetric::kMessagesRefused)];
  refused =
      &prometheus::BuildCounter().Name(refused_info.name).Help(refused_info.help).Register(*own).Add({});
  const NodeMetricInfo& build_info = node_metric_table()[static_cast<std::size_t>(NodeMetric::kBuildInfo)];
  prometheus::BuildGauge()
      .Name(build_info.name)
      .Help(build_info.help)
      .Register(*own)
      .Add({{"version", kVersion}})
      .Set(1);
  facts = {::getpid(), kVersion, options.socket, {}};
  if (options.listen.empty()) return {};
  auto opened = MetricsServer::open(options.listen, {std::make_shared<Exposition>(clients), own});
  if (!opened) return opened.error();
  http = std::move(*opened);
  facts.listen = http->address();
  return {};
}

bool Server::Impl::watch(int fd, std::uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = tag;
  return ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void Server::Impl::accept_all() {
  for (std::size_t i = 0; i < kMaxConnections; ++i) {
    OwnedFd socket(::accept4(claim.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) return;
    if (connections.size() >= kMaxConnections) continue;  // hung up at once
    accept_one(std::move(socket));
  }
}

void Server::Impl::accept_one(OwnedFd socket) {
  const std::uint64_t tag = next_tag++;
  Connection connection;
  connection.peer = peer_of(socket.get());
  connection.process = process_handle(connection.peer);
  connection.wire = WireConnection(std::move(socket));
  if (!watch(connection.wire.fd(), tag)) return;
  if (connection.process.valid()) (void)watch(connection.process.get(), tag);
  connections.emplace(tag, std::move(connection));
}

void Server::Impl::drop(std::uint64_t tag) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  if (found->second.client) {
    clients.leave(*found->second.client);
    spdlog::info("client {} (pid {}) has ended", found->second.client->value, found->second.peer);
  }
  connections.erase(found);
  idle_since = WallClock::now();
}

void Server::Impl::refuse(std::uint64_t tag, const Error& error, std::uint32_t sequence) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  spdlog::warn("pid {}: {}", found->second.peer, error.text);
  refused->Increment();
  (void)found->second.wire.send(Refusal{error.code, error.text}, sequence);
  drop(tag);
}

void Server::Impl::reply(std::uint64_t tag, const Message& message, std::uint32_t sequence) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  if (!found->second.wire.send(message, sequence)) drop(tag);  // gone, or doesn't read what it asks for
}

// Reads one message: a busy client waits its turn. Epoll is level-triggered, so the rest comes next.
void Server::Impl::serve(std::uint64_t tag) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  auto envelope = found->second.wire.receive(milliseconds(0));
  if (!envelope && envelope.error().code == Errc::kTimeout) {
    // Nothing to read, so the event was the peer's end.
    pollfd ended{found->second.process.get(), POLLIN, 0};
    if (ended.fd >= 0 && ::poll(&ended, 1, 0) > 0) drop(tag);
    return;
  }
  if (!envelope && envelope.error().code == Errc::kProtocol) return refuse(tag, envelope.error(), 0);
  if (!envelope) return drop(tag);
  answer(tag, *envelope);
}

void Server::Impl::answer(std::uint64_t tag, Envelope& envelope) {
  Connection& connection = connections.at(tag);
  const auto bad = [&](const char* why) { refuse(tag, Error{Errc::kProtocol, why}, envelope.sequence); };
  if (const auto* hello = std::get_if<Hello>(&envelope.message)) {
    return connection.greeted ? bad("a second Hello") : greet(tag, envelope, *hello);
  }
  if (const auto* status = std::get_if<StatusRequest>(&envelope.message)) {
    return reply(tag, StatusReply{status_json(facts, clients.view(), status->run)}, envelope.sequence);
  }
  if (!connection.client) return bad("Hello comes first");
  if (const auto* request = std::get_if<LeaseRequest>(&envelope.message)) {
    if (!in_grace()) return lease(tag, envelope.sequence, *request);
    if (connection.waiting) return bad("one lease request at a time");
    connection.waiting.emplace(envelope.sequence, *request);
    return;
  }
  if (const auto* release = std::get_if<Release>(&envelope.message)) {
    const auto tier = static_cast<TierId>(release->tier);
    clients.release(*connection.client, tier, Bytes(release->bytes));
    const LeaseGrant left{release->tier, 0, 0, clients.leased(*connection.client, tier).count()};
    return reply(tag, left, envelope.sequence);
  }
  bad("a message that only the daemon sends");
}

void Server::Impl::greet(std::uint64_t tag, Envelope& envelope, const Hello& hello) {
  Connection& connection = connections.at(tag);
  Welcome welcome{0, facts.pid, 0, {}, {}};
  if (hello.role == Role::kClient) {
    if (!envelope.fd.valid())
      return refuse(tag, {Errc::kProtocol, "Hello without a page"}, envelope.sequence);
    auto page = SharedPageReader::open(envelope.fd.release());
    if (!page) return refuse(tag, page.error(), envelope.sequence);
    const pid_t pid = connection.peer > 0 ? connection.peer : hello.pid;
    auto joined = clients.join(hello, pid, std::move(*page));
    if (!joined) return refuse(tag, joined.error(), envelope.sequence);
    for (auto& [other_tag, other] : connections) {
      if (joined->replaced && other.client == joined->replaced) other.client.reset();
    }
    connection.client = joined->client;
    welcome = {joined->client.value, facts.pid, 0, wire_amounts(joined->budget),
               wire_amounts(joined->leased)};
    spdlog::info("client {} (pid {}, job {}) has joined", joined->client.value, pid, hello.job.view());
  }
  connection.greeted = true;
  reply(tag, welcome, envelope.sequence);
}

void Server::Impl::lease(std::uint64_t tag, std::uint32_t sequence, const LeaseRequest& request) {
  const auto found = connections.find(tag);
  if (found == connections.end() || !found->second.client) return;
  const auto tier = static_cast<TierId>(request.tier);
  const ClientId client = *found->second.client;
  const Bytes granted = clients.request(client, tier, Bytes(request.wanted));
  reply(tag, LeaseGrant{request.tier, 0, granted.count(), clients.leased(client, tier).count()}, sequence);
}

void Server::Impl::serve_waiting() {
  if (in_grace()) return;
  std::vector<std::uint64_t> tags;
  for (const auto& [tag, connection] : connections) {
    if (connection.waiting) tags.push_back(tag);
  }
  for (const std::uint64_t tag : tags) {
    const auto [sequence, request] = *std::exchange(connections.at(tag).waiting, std::nullopt);
    lease(tag, sequence, request);
  }
}

bool Server::Impl::idle_for_long() {
  for (const auto& [tag, connection] : connections) {
    if (!connection.greeted) continue;
    idle_since = WallClock::now();
    return false;
  }
  return options.exit_when_idle && WallClock::now() - idle_since >= *options.exit_when_idle;
}

milliseconds Server::Impl::patience() const {
  if (in_grace()) return milliseconds(50);
  return options.exit_when_idle ? std::min(milliseconds(500), *options.exit_when_idle + milliseconds(1))
                                : milliseconds(5000);
}

Status Server::Impl::loop() {
  idle_since = WallClock::now();
  if (claim.replaced_stale()) grace_ends = WallClock::now() + options.rejoin_grace;
  std::array<epoll_event, 64> events;
  for (;;) {
    const int timeout = static_cast<int>(patience().count());
    const int count = ::epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), timeout);
    if (count < 0 && errno != EINTR) return Error{Errc::kIo, std::string("epoll: ") + std::strerror(errno)};
    for (int i = 0; i < count; ++i) {
      const std::uint64_t tag = events[static_cast<std::size_t>(i)].data.u64;
      if (tag == kStop) return {};
      if (tag == kListening) {
        accept_all();
      } else {
        serve(tag);
      }
    }
    serve_waiting();
    if (idle_for_long()) {
      spdlog::info("idle: nobody is connected");
      return {};
    }
  }
}

Result<std::unique_ptr<Server>> Server::open(Options options) {
  auto claim = SocketClaim::claim(options.socket);
  if (!claim) return claim.error();
  auto impl = std::make_unique<Impl>(std::move(options), std::move(*claim));
  if (Status ready = impl->prepare(); !ready) return ready.error();
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() { impl_->http.reset(); }  // before what it serves
Status Server::run() {
  Status ended = impl_->loop();
  if (!impl_->clients.view().live.empty()) impl_->claim.leave_behind();
  return ended;
}
void Server::stop() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(impl_->stop.get(), &one, sizeof one);
}
const std::string& Server::listen_address() const { return impl_->facts.listen; }
ClientRegistry& Server::registry() { return impl_->clients; }

}  // namespace terrace
