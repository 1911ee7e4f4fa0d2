#include "daemon/observer.hpp"

#include <unistd.h>

#include <chrono>

namespace terrace {
namespace {
constexpr std::chrono::milliseconds kPatience{5000};
}  // namespace

Result<Observer> Observer::connect(const std::string& socket) {
  auto connection = WireConnection::connect(socket);
  if (!connection) return connection.error();
  Observer observer(std::move(*connection));
  Hello hello;
  hello.pid = ::getpid();
  hello.role = Role::kObserver;
  const auto reply = observer.ask(hello);
  if (!reply) return reply.error();
  if (!std::holds_alternative<Welcome>(*reply))
    return Error{Errc::kProtocol, "the daemon did not say welcome"};
  return observer;
}

Result<std::string> Observer::status(std::uint64_t run) {
  auto reply = ask(StatusRequest{run});
  if (!reply) return reply.error();
  auto* status = std::get_if<StatusReply>(&*reply);
  if (status == nullptr) return Error{Errc::kProtocol, "the daemon did not answer with its status"};
  return std::move(status->json);
}

Status Observer::reload() {
  const auto reply = ask(ReloadRequest{});
  if (!reply) return reply.error();
  if (!std::holds_alternative<Done>(*reply)) return Error{Errc::kProtocol, "the daemon did not say done"};
  return {};
}

Status Observer::steer(pid_t pid, Course course) {
  const auto reply = ask(SteerRequest{pid, course});
  if (!reply) return reply.error();
  if (!std::holds_alternative<Done>(*reply)) return Error{Errc::kProtocol, "the daemon did not say done"};
  return {};
}

Result<Message> Observer::ask(const Message& message) {
  const std::uint32_t mine = ++sequence_;
  if (Status sent = connection_.send(message, mine); !sent) return sent.error();
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    auto reply = connection_.receive(std::chrono::milliseconds(100));
    if (!reply && reply.error().code == Errc::kTimeout) continue;
    if (!reply) return reply.error();
    if (const auto* refusal = std::get_if<Refusal>(&reply->message))
      return Error{refusal->code, refusal->text};
    if (reply->sequence == mine) return std::move(reply->message);
  }
  return Error{Errc::kTimeout, "the daemon does not answer"};
}

}  // namespace terrace
