// What the server says to each message, and what it says by itself.
#include <spdlog/spdlog.h>

#include <algorithm>

#include "daemon/server_impl.hpp"

namespace terrace {
namespace {

TierBytes wire_amounts(const TierAmounts& amounts) {
  TierBytes bytes{};
  for (std::size_t tier = 0; tier < kTierCount; ++tier) bytes[tier] = amounts[tier].count();
  return bytes;
}

LeaseGrant grant_of(std::uint32_t tier, const ClientRegistry::Grant& grant) {
  return {tier, grant.coming ? 1U : 0U, grant.granted.count(), grant.leased.count()};
}

}  // namespace

void Server::Impl::refuse(std::uint64_t tag, const Error& error, std::uint32_t sequence) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  spdlog::warn("pid {}: {}", found->second.peer.pid, error.text);
  refused->Increment();
  (void)found->second.wire.send(Refusal{error.code, error.text}, sequence);
  drop(tag);
}

void Server::Impl::reply(std::uint64_t tag, const Message& message, std::uint32_t sequence, int fd) {
  const auto found = connections.find(tag);
  if (found == connections.end()) return;
  if (!found->second.wire.send(message, sequence, fd)) drop(tag);  // gone, or doesn't read what it asks for
}

void Server::Impl::answer(std::uint64_t tag, Envelope& envelope) {
  const Connection& connection = connections.at(tag);
  const auto bad = [&](const char* why) { refuse(tag, Error{Errc::kProtocol, why}, envelope.sequence); };
  if (connection.right == Right::kNone) {
    const char* why =
        "this user may not use the daemon; daemon.group and daemon.readers of its policy name who may";
    return refuse(tag, Error{Errc::kInvalidArgument, why}, envelope.sequence);
  }
  if (const auto* hello = std::get_if<Hello>(&envelope.message)) {
    return connection.greeted ? bad("a second Hello") : greet(tag, envelope, *hello);
  }
  if (const auto* status = std::get_if<StatusRequest>(&envelope.message)) {
    return reply(tag, StatusReply{status_for(connection, status->run)}, envelope.sequence);
  }
  if (const auto* request = std::get_if<SteerRequest>(&envelope.message)) {
    return steer(tag, envelope.sequence, *request);
  }
  if (std::holds_alternative<ReloadRequest>(envelope.message)) {
    Status read = connection.right == Right::kOwn
                      ? read_policy_anew()
                      : Error{Errc::kInvalidArgument, "only root and the daemon's own user may reload it"};
    if (!read) return reply(tag, Refusal{read.error().code, read.error().text}, envelope.sequence);
    return reply(tag, Done{clients.clients()}, envelope.sequence);
  }
  if (!connection.client) return bad("Hello comes first");
  answer_client(tag, envelope);
}

void Server::Impl::answer_client(std::uint64_t tag, const Envelope& envelope) {
  Connection& connection = connections.at(tag);
  const auto bad = [&](const char* why) { refuse(tag, Error{Errc::kProtocol, why}, envelope.sequence); };
  if (const auto* request = std::get_if<LeaseRequest>(&envelope.message)) {
    if (!in_grace()) return lease(tag, envelope.sequence, *request);
    if (connection.waiting) return bad("one lease request at a time");
    connection.waiting.emplace(envelope.sequence, *request);
    return;
  }
  if (const auto* release = std::get_if<Release>(&envelope.message)) {
    const auto left = clients.release(*connection.client, *release);
    return reply(tag, grant_of(release->tier, left), envelope.sequence);
  }
  if (const auto* shrunk = std::get_if<ShrinkReply>(&envelope.message)) {
    const auto left = clients.answer(*connection.client, *shrunk, server_time());
    return reply(tag, grant_of(shrunk->tier, left), envelope.sequence);
  }
  bad("a message that only the daemon sends");
}

Result<Server::Impl::Admitted> Server::Impl::admit(Connection& connection, Envelope& envelope,
                                                   const Hello& hello) {
  if (connection.right < Right::kRegister)
    return Error{Errc::kInvalidArgument,
                 "this user may not register processes; daemon.group of the daemon's policy names who may"};
  if (!envelope.fd.valid()) return Error{Errc::kProtocol, "Hello without a page"};
  auto page = SharedPageReader::open(envelope.fd.release());
  if (!page) return page.error();
  const Peer& peer = connection.peer;
  const pid_t pid = peer.pid > 0 ? peer.pid : hello.pid;
  const std::string user = user_name(peer.uid);
  auto joined = clients.join(hello, {pid, peer.uid, user}, std::move(*page));
  if (!joined) return joined.error();
  if (joined->replaced) {
    const auto earlier = tags.find(*joined->replaced);
    if (earlier != tags.end()) connections.at(earlier->second).client.reset();
    tags.erase(*joined->replaced);
  }
  connection.client = joined->client;
  spdlog::info("client {} (pid {}, user {}, job {}) has joined", joined->client.value, pid, user,
               clean_job_name(hello.job.view()));
  const auto& seat = joined->link_seat;
  return Admitted{{joined->client.value, facts.pid, seat ? static_cast<std::uint32_t>(seat->slot + 1) : 0,
                   wire_amounts(joined->budget), wire_amounts(joined->leased)},
                  seat ? seat->fd : -1};
}

void Server::Impl::greet(std::uint64_t tag, Envelope& envelope, const Hello& hello) {
  Connection& connection = connections.at(tag);
  Admitted admitted{{0, facts.pid, 0, {}, {}}, -1};
  if (hello.role == Role::kClient) {
    auto client = admit(connection, envelope, hello);
    if (!client) return refuse(tag, client.error(), envelope.sequence);
    admitted = *client;
    tags[*connection.client] = tag;
  }
  connection.greeted = true;
  ++greeted;
  reply(tag, admitted.welcome, envelope.sequence, admitted.board);
}

void Server::Impl::lease(std::uint64_t tag, std::uint32_t sequence, const LeaseRequest& request) {
  const auto found = connections.find(tag);
  if (found == connections.end() || !found->second.client) return;
  const auto grant = clients.request(*found->second.client, request, server_time());
  reply(tag, grant_of(request.tier, grant), sequence);
}

// The same answer where there is no such process and where it is somebody else's.
void Server::Impl::steer(std::uint64_t tag, std::uint32_t sequence, const SteerRequest& request) {
  const uid_t user = connections.at(tag).peer.uid;
  std::optional<uid_t> only;
  if (connections.at(tag).right != Right::kOwn) only = user;
  const auto concerned = clients.steer(request.pid, request.course, only);
  if (concerned.empty()) {
    return reply(tag,
                 Refusal{Errc::kNotFound, "no process " + std::to_string(request.pid) +
                                              " of yours is registered; `terrace status` lists them"},
                 sequence);
  }
  for (const ClientId client : concerned) {
    spdlog::info("client {} (pid {}) is switched {} by user {}", client.value, request.pid,
                 request.course == Course::kPassthrough ? "off" : "on", user_name(user));
    if (const auto found = tags.find(client); found != tags.end())
      reply(found->second, Steer{request.course, 0}, 0);
  }
  reply(tag, Done{concerned.size()}, sequence);
}

// Totals for all; processes for those whose they are.
std::string Server::Impl::status_for(const Connection& connection, std::uint64_t run) {
  ClientRegistry::View view = clients.view();
  if (connection.right != Right::kOwn) {
    const auto hidden = [&](const ClientRegistry::Record& record) {
      return connection.right < Right::kRegister || record.uid != connection.peer.uid;
    };
    std::erase_if(view.live, hidden);
    std::erase_if(view.ended, hidden);
  }
  return status_json(facts, view, run);
}

// Whole or not at all.
Status Server::Impl::read_policy_anew() {
  if (!options.reread) return Error{Errc::kInvalidArgument, "this daemon was started without a policy file"};
  auto live = options.reread();
  if (!live) return live.error();
  live->access.owner = options.access.owner;
  if (Status opened = claim.open_to({live->access.socket_mode(), live->access.group}); !opened) {
    (void)claim.open_to({options.access.socket_mode(), options.access.group});
    return opened;
  }
  options.access = live->access;
  for (auto& [tag, connection] : connections) connection.right = right_of(connection.peer, options.access);
  clients.set_limits(live->limits);
  spdlog::info("the policy has been read anew");
  return {};
}

void Server::Impl::reload_and_log() {
  if (Status read = read_policy_anew(); !read)
    spdlog::error("the policy stays as it was: {}", read.error().text);
}

void Server::Impl::serve_waiting() {
  if (in_grace() || grace_ends == Time()) return;
  grace_ends = Time();
  std::vector<std::uint64_t> waiting;
  for (const auto& [tag, connection] : connections) {
    if (connection.waiting) waiting.push_back(tag);
  }
  for (const std::uint64_t tag : waiting) {
    const auto [sequence, request] = *std::exchange(connections.at(tag).waiting, std::nullopt);
    lease(tag, sequence, request);
  }
}

void Server::Impl::settle() {
  if (in_grace()) return;
  for (const LeaseEvent& event : clients.settle(server_time())) {
    const auto tier = static_cast<std::uint32_t>(event.tier);
    if (event.what == LeaseEvent::What::kDeaf) {
      spdlog::warn("client {} has not answered: it keeps {} of {} and is granted no more than its guarantee",
                   event.client.value, format_bytes(event.bytes), name_of(event.tier));
      deaf->Set(static_cast<double>(clients.deaf_clients()));
      continue;
    }
    const auto found = tags.find(event.client);
    if (found == tags.end()) continue;
    if (event.what == LeaseEvent::What::kGrant) {
      const LeaseGrant grant{tier, event.coming ? 1U : 0U, event.bytes.count(),
                             clients.leased(event.client, event.tier).count()};
      reply(found->second, grant, 0);
    } else {
      shrinks->Increment();
      const auto patience = static_cast<std::uint32_t>(options.registry.manners.patience.count());
      reply(found->second, ShrinkRequest{tier, patience, event.ask, event.bytes.count()}, 0);
    }
  }
}

}  // namespace terrace
