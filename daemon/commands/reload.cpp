#include <memory>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"

namespace terrace {
namespace {

int reload(const DaemonChoice& daemon) {
  auto observer = connect(daemon);
  if (!observer) return say_failure(observer.error());
  const Status done = observer->reload();
  if (done) return 0;
  say_failure(done.error());
  return kRefused;
}

}  // namespace

void add_reload(CLI::App& app, Invocation& invocation) {
  const auto daemon = std::make_shared<DaemonChoice>();
  CLI::App* command = app.add_subcommand("reload", "Have the daemon read its policy anew");
  add_daemon_options(*command, *daemon);
  command->callback([daemon, &invocation] { invocation.exit_code = reload(*daemon); });
}

}  // namespace terrace
