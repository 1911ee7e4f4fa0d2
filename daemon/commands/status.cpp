#include <cstdio>
#include <memory>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"
#include "daemon/status_text.hpp"

namespace terrace {
namespace {

struct StatusOptions {
  DaemonChoice daemon;
  bool json = false;
};

int status(const StatusOptions& options) {
  auto observer = connect(options.daemon);
  if (!observer) return say_failure(observer.error());
  const auto reply = observer->status(0);
  if (!reply) return say_failure(reply.error());
  std::fputs(options.json ? (*reply + "\n").c_str() : status_text(*reply).c_str(), stdout);
  return 0;
}

}  // namespace

void add_status(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<StatusOptions>();
  CLI::App* command = app.add_subcommand("status", "Show the daemon's clients and leases");
  add_daemon_options(*command, options->daemon);
  command->add_flag("--json", options->json, "As one line of JSON");
  command->callback([options, &invocation] { invocation.exit_code = status(*options); });
}

}  // namespace terrace
