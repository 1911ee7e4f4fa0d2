// The server's parts, shared by its source files. Nobody else includes this.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <map>
#include <utility>

#include "daemon/message_rate.hpp"
#include "daemon/metrics_server.hpp"
#include "daemon/server.hpp"
#include "daemon/socket_claim.hpp"
#include "daemon/status_json.hpp"
#include "runtime/wire.hpp"

namespace terrace {

struct Connection {
  WireConnection wire;
  Peer peer;
  Right right = Right::kNone;
  MessageRate rate;
  std::optional<std::chrono::milliseconds> paused_until;  // it talks too fast
  std::chrono::milliseconds opened_at{};
  bool greeted = false;
  std::optional<ClientId> client;  // an observer has none
  std::optional<std::pair<std::uint32_t, LeaseRequest>>
      waiting;  // sequence and request, until the grace ends
};

struct Server::Impl {
  using Time = std::chrono::milliseconds;  // of the steady clock

  Impl(Options opened_with, SocketClaim claimed)
      : options(std::move(opened_with)), claim(std::move(claimed)), clients(options.registry) {}

  Options options;
  SocketClaim claim;
  ClientRegistry clients;
  std::shared_ptr<prometheus::Registry> own = std::make_shared<prometheus::Registry>();
  prometheus::Counter* refused = nullptr;
  prometheus::Counter* shrinks = nullptr;
  prometheus::Gauge* deaf = nullptr;
  std::unique_ptr<MetricsServer> http;
  DaemonFacts facts;
  OwnedFd epoll{::epoll_create1(EPOLL_CLOEXEC)};
  OwnedFd wake{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<bool> stopping{false}, reloading{false};
  bool accepting = true;  // false: out of descriptors, until the next look around
  std::map<std::uint64_t, Connection> connections;
  std::map<ClientId, std::uint64_t> tags;  // of clients' connections
  std::map<uid_t, std::size_t> by_user;    // connections
  std::size_t greeted = 0, paused = 0;     // connections
  std::uint64_t next_tag;
  Time grace_ends{}, idle_since{}, next_look{}, next_alive{};

  // server.cpp
  Status prepare();
  void count_own_metrics();
  [[nodiscard]] bool watch(int fd, std::uint64_t tag);
  void listen_to(std::uint64_t tag, Connection& connection, std::uint32_t events);
  void accept_all();
  void accept_one(OwnedFd socket);
  void stop_accepting(int why);
  void accept_again();
  void serve(std::uint64_t tag, std::uint32_t events);
  void drop(std::uint64_t tag);
  void resume_paused();
  void look_around();
  [[nodiscard]] bool in_grace() const;
  [[nodiscard]] bool idle_for_long();
  [[nodiscard]] Time patience() const;
  Status loop();

  // server_answers.cpp
  void refuse(std::uint64_t tag, const Error& error, std::uint32_t sequence);
  void answer(std::uint64_t tag, Envelope& envelope);
  void answer_client(std::uint64_t tag, const Envelope& envelope);
  void greet(std::uint64_t tag, Envelope& envelope, const Hello& hello);
  struct Admitted {
    Welcome welcome;
    int board = -1;  // that goes with it
  };
  [[nodiscard]] Result<Admitted> admit(Connection& connection, Envelope& envelope, const Hello& hello);
  void lease(std::uint64_t tag, std::uint32_t sequence, const LeaseRequest& request);
  void steer(std::uint64_t tag, std::uint32_t sequence, const SteerRequest& request);
  [[nodiscard]] std::string status_for(const Connection& connection, std::uint64_t run);
  [[nodiscard]] Status read_policy_anew();
  void reload_and_log();
  void reply(std::uint64_t tag, const Message& message, std::uint32_t sequence, int fd = -1);
  void serve_waiting();
  void settle();
};

// Milliseconds of the steady clock.
[[nodiscard]] std::chrono::milliseconds server_time();

}  // namespace terrace
