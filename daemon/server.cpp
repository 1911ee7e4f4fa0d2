#include "daemon/server.hpp"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "daemon/server_impl.hpp"
#include "daemon/version.hpp"

namespace terrace {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kMaxConnections = 1024;
constexpr std::size_t kMaxConnectionsOfUser = 512;  // of others than the daemon's own
constexpr milliseconds kGreetingPatience{10000};    // for who connects and says nothing
constexpr milliseconds kLookAround{1000};
// Epoll tags: of a connection, twice its number for the socket, and one more for the process behind it.
constexpr std::uint64_t kListening = 0;
constexpr std::uint64_t kWake = 1;
constexpr std::uint64_t kFirstConnection = 1;

const NodeMetricInfo& info_of(NodeMetric metric) {
  return node_metric_table()[static_cast<std::size_t>(metric)];
}

}  // namespace

milliseconds server_time() {
  return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now().time_since_epoch());
}

Status Server::Impl::prepare() {
  next_tag = kFirstConnection;
  if (!epoll.valid() || !wake.valid() || !watch(claim.fd(), kListening) || !watch(wake.get(), kWake)) {
    return Error{Errc::kIo, std::string("epoll: ") + std::strerror(errno)};
  }
  count_own_metrics();
  facts = {::getpid(), kVersion, options.socket, {}};
  if (options.listen.empty()) return {};
  auto opened = MetricsServer::open({.listen = options.listen,
                                     .tls_cert = options.tls_cert,
                                     .tls_key = options.tls_key,
                                     .auth_file = options.auth_file,
                                     .version = kVersion},
                                    clients, {own});
  if (!opened) return opened.error();
  http = std::move(*opened);
  facts.listen = http->address();
  return {};
}

void Server::Impl::count_own_metrics() {
  const auto counter = [this](NodeMetric metric) {
    const NodeMetricInfo& info = info_of(metric);
    return &prometheus::BuildCounter().Name(info.name).Help(info.help).Register(*own).Add({});
  };
  refused = counter(NodeMetric::kMessagesRefused);
  shrinks = counter(NodeMetric::kShrinkRequests);
  const NodeMetricInfo& deaf_info = info_of(NodeMetric::kDeafClients);
  deaf = &prometheus::BuildGauge().Name(deaf_info.name).Help(deaf_info.help).Register(*own).Add({});
  const NodeMetricInfo& build_info = info_of(NodeMetric::kBuildInfo);
  prometheus::BuildGauge()
      .Name(build_info.name)
      .Help(build_info.help)
      .Register(*own)
      .Add({{"version", kVersion}})
      .Set(1);
}

bool Server::Impl::watch(int fd, std::uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = tag;
  return ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void Server::Impl::listen_to(std::uint64_t tag, Connection& connection, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = 2 * tag;
  (void)::epoll_ctl(epoll.get(), EPOLL_CTL_MOD, connection.wire.fd(), &event);
}

void Server::Impl::accept_all() {
  for (std::size_t i = 0; i < kMaxConnections; ++i) {
    OwnedFd socket(::accept4(claim.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) stop_accepting(errno);
      return;
    }
    if (connections.size() >= kMaxConnections) continue;  // hung up at once
    accept_one(std::move(socket));
  }
}

// Whoever waits for a descriptor goes on waiting; asked again at once, epoll would say the same for ever.
void Server::Impl::stop_accepting(int why) {
  spdlog::warn("nobody more can connect for now: {}", std::strerror(why));
  accepting = false;
  epoll_event event{};
  event.data.u64 = kListening;
  (void)::epoll_ctl(epoll.get(), EPOLL_CTL_MOD, claim.fd(), &event);
  next_look = server_time() + kLookAround;
}

void Server::Impl::accept_again() {
  if (std::exchange(accepting, true)) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kListening;
  (void)::epoll_ctl(epoll.get(), EPOLL_CTL_MOD, claim.fd(), &event);
}

void Server::Impl::accept_one(OwnedFd socket) {
  auto peer = peer_of(socket.get());
  if (!peer) return;  // hung up at once
  Connection connection;
  connection.right = right_of(*peer, options.access);
  connection.peer = std::move(*peer);
  connection.wire = WireConnection(std::move(socket));
  connection.opened_at = server_time();
  const uid_t user = connection.peer.uid;
  if (connection.right != Right::kOwn && by_user[user] >= kMaxConnectionsOfUser) {
    refused->Increment();
    return;  // hung up at once
  }
  const std::uint64_t tag = next_tag++;
  if (!watch(connection.wire.fd(), 2 * tag)) return;
  if (connection.peer.process.valid()) (void)watch(connection.peer.process.get(), 2 * tag + 1);
  ++by_user[user];
  connections.emplace(tag, std::move(connection));
}

void Server::Impl::drop(std::uint64_t tag) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  const Connection& gone = found->second;
  if (gone.client) {
    clients.leave(*gone.client);
    tags.erase(*gone.client);
    spdlog::info("client {} (pid {}) has ended", gone.client->value, gone.peer.pid);
  }
  if (gone.greeted) --greeted;
  if (gone.paused_until) --paused;
  if (--by_user[gone.peer.uid] == 0) by_user.erase(gone.peer.uid);
  connections.erase(found);
  idle_since = server_time();
}

// Reads one message: a busy client waits its turn. Epoll is level-triggered, so the rest comes next.
void Server::Impl::serve(std::uint64_t tag, std::uint32_t events) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  Connection& connection = found->second;
  if (connection.paused_until) {  // then only its end is waited for
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) drop(tag);
    return;
  }
  if (!connection.rate.take(server_time())) {
    connection.paused_until = connection.rate.opens_at();
    ++paused;
    return listen_to(tag, connection, EPOLLRDHUP);
  }
  auto envelope = connection.wire.receive(milliseconds(0));
  if (!envelope && envelope.error().code == Errc::kTimeout) return;
  if (!envelope && envelope.error().code == Errc::kProtocol) return refuse(tag, envelope.error(), 0);
  if (!envelope) return drop(tag);
  answer(tag, *envelope);
}

void Server::Impl::resume_paused() {
  if (paused == 0) return;
  const milliseconds now = server_time();
  for (auto& [tag, connection] : connections) {
    if (!connection.paused_until || *connection.paused_until > now) continue;
    connection.paused_until.reset();
    --paused;
    listen_to(tag, connection, EPOLLIN | EPOLLRDHUP);
  }
}

// What is looked at now and then: who connected and says nothing, the service manager.
void Server::Impl::look_around() {
  const milliseconds now = server_time();
  if (options.notice.alive_every() && now >= next_alive) {
    options.notice.alive();
    next_alive = now + *options.notice.alive_every();
  }
  if (now < next_look) return;
  next_look = now + kLookAround;
  accept_again();
  deaf->Set(static_cast<double>(clients.deaf_clients()));
  std::vector<std::uint64_t> silent;
  for (const auto& [tag, connection] : connections) {
    if (!connection.greeted && now - connection.opened_at > kGreetingPatience) silent.push_back(tag);
  }
  for (const std::uint64_t tag : silent) drop(tag);
}

bool Server::Impl::in_grace() const { return server_time() < grace_ends; }

bool Server::Impl::idle_for_long() {
  if (!options.exit_when_idle) return false;
  if (greeted > 0) idle_since = server_time();
  return server_time() - idle_since >= *options.exit_when_idle;
}

milliseconds Server::Impl::patience() const {
  if (in_grace()) return milliseconds(50);
  milliseconds longest{5000};
  const auto until = [&longest](milliseconds time) {
    longest = std::min(longest, std::max(milliseconds(1), time - server_time() + milliseconds(1)));
  };
  if (options.exit_when_idle)
    longest = std::min(milliseconds(500), *options.exit_when_idle + milliseconds(1));
  if (greeted < connections.size() || !accepting) until(next_look);
  if (options.notice.alive_every()) until(next_alive);
  if (const auto due = clients.due()) until(*due);
  if (const auto due = clients.look_due()) until(std::chrono::ceil<milliseconds>(*due));
  if (paused == 0) return longest;
  for (const auto& [tag, connection] : connections) {
    if (connection.paused_until) until(*connection.paused_until);
  }
  return longest;
}

Status Server::Impl::loop() {
  idle_since = server_time();
  if (claim.replaced_stale()) grace_ends = server_time() + options.rejoin_grace;
  options.notice.ready();
  std::array<epoll_event, 64> events;
  for (;;) {
    const int timeout = static_cast<int>(patience().count());
    const int count = ::epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), timeout);
    if (count < 0 && errno != EINTR) return Error{Errc::kIo, std::string("epoll: ") + std::strerror(errno)};
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      const std::uint64_t tag = event.data.u64;
      if (tag == kListening) {
        accept_all();
      } else if (tag == kWake) {
        std::uint64_t ignored = 0;
        [[maybe_unused]] const ssize_t drained = ::read(wake.get(), &ignored, sizeof ignored);
        if (stopping.load()) return {};
        if (reloading.exchange(false)) reload_and_log();
      } else if (tag % 2 == 1) {
        drop(tag / 2);  // the process has ended, whoever else has its socket
      } else {
        serve(tag / 2, event.events);
      }
    }
    resume_paused();
    serve_waiting();
    clients.look(steady_clock().now());
    settle();
    look_around();
    if (idle_for_long()) {
      spdlog::info("idle: nobody is connected");
      return {};
    }
  }
}

Result<std::unique_ptr<Server>> Server::open(Options options) {
  options.access.owner = ::geteuid();
  auto claim = SocketClaim::claim(options.socket, {options.access.socket_mode(), options.access.group});
  if (!claim) return claim.error();
  auto impl = std::make_unique<Impl>(std::move(options), std::move(*claim));
  if (Status ready = impl->prepare(); !ready) return ready.error();
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() { impl_->http.reset(); }  // before what it serves
Status Server::run() {
  Status ended = impl_->loop();
  impl_->options.notice.stopping();
  if (impl_->clients.clients() > 0) impl_->claim.leave_behind();
  return ended;
}
void Server::stop() noexcept {
  impl_->stopping.store(true);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(impl_->wake.get(), &one, sizeof one);
}
void Server::reload() noexcept {
  impl_->reloading.store(true);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(impl_->wake.get(), &one, sizeof one);
}
const std::string& Server::listen_address() const { return impl_->facts.listen; }
ClientRegistry& Server::registry() { return impl_->clients; }

}  // namespace terrace
