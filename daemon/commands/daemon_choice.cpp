#include "daemon/commands/daemon_choice.hpp"

#include <cstdio>

#include "daemon/commands/commands.hpp"
#include "daemon/run_command.hpp"

namespace terrace {

void add_daemon_options(CLI::App& command, DaemonChoice& choice) {
  command.add_option("--socket", choice.socket, "Socket of the daemon");
  command.add_option("--policy", choice.policy_file, "Policy file that names the socket");
}

Result<Observer> connect(const DaemonChoice& choice) {
  const auto policy = policy_from(choice.policy_file);
  if (!policy) return policy.error();
  const auto socket = socket_for(choice.socket, *policy);
  if (!socket) return socket.error();
  return Observer::connect(*socket);
}

int say_failure(const Error& error) {
  std::fprintf(stderr, "terrace: %s\n", error.text.c_str());
  return error.code == Errc::kInvalidArgument ? kRefused : kFailed;
}

}  // namespace terrace
