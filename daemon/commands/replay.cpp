#include <memory>

#include "daemon/commands/commands.hpp"
#include "daemon/replay_command.hpp"

namespace terrace {

void add_replay(CLI::App& app, Invocation& invocation) {
  const auto replay = std::make_shared<ReplayOptions>();
  CLI::App* command = app.add_subcommand("replay", "Replay a recorded trace against an allocator");
  command->add_option("trace", replay->trace, "File of `terrace run --record`, also with gzip")->required();
  command->add_option("--allocator", replay->allocator, "terrace, baseline (none), or a plugin's FILE.so");
  command->add_option("--device", replay->device, "auto, cuda or emulated");
  command->add_option("--budget", replay->budget, "Bytes that the allocator may hold; else the device's");
  command->add_flag_callback(
      "--json", [replay] { replay->form = ReportForm::kJson; }, "As one line of JSON");
  command->callback([replay, &invocation] { invocation.exit_code = replay_command(*replay); });
}

}  // namespace terrace
