#include <memory>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"

namespace terrace {
namespace {

struct OffOptions {
  DaemonChoice daemon;
  int pid = 0;
  Course course = Course::kPassthrough;
};

int steer(const OffOptions& options) {
  auto observer = connect(options.daemon);
  if (!observer) return say_failure(observer.error());
  const Status done = observer->steer(options.pid, options.course);
  return done ? 0 : say_failure(done.error());
}

}  // namespace

void add_off(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<OffOptions>();
  CLI::App* command =
      app.add_subcommand("off", "Switch Terrace off for a live process: its new work goes without");
  command->add_option("pid", options->pid, "The process, as `terrace status` lists it")->required();
  command->add_flag_callback(
      "--undo", [options] { options->course = Course::kTiering; }, "Switch it on again");
  add_daemon_options(*command, options->daemon);
  command->callback([options, &invocation] { invocation.exit_code = steer(*options); });
}

}  // namespace terrace
