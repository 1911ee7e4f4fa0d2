#include "daemon/run_command.hpp"

#include <memory>

#include "daemon/commands/commands.hpp"

namespace terrace {

void add_run(CLI::App& app, Invocation& invocation) {
  const auto run = std::make_shared<RunOptions>();
  CLI::App* command =
      app.add_subcommand("run", "Run a command with a daemon at its side: terrace run -- CMD...");
  command->add_option("--policy", run->policy_file, "Policy file");
  command->add_option("--socket", run->socket, "Socket of the daemon");
  command->add_option("--listen", run->listen, "Address for metrics, where a daemon is started");
  command->add_option("--job", run->job, "Name of the job in the metrics; else the command's name");
  command->add_option("--record", run->record,
                      "Write a trace of the command's device allocations to this file");
  command->add_option(
      "--allocator", run->allocator,
      "native: PyTorch's own; terrace: PyTorch's cudaMallocAsync backend, served from our pool");
  command->add_option("command", run->command, "The command and its arguments")->required();
  command->positionals_at_end();
  command->callback([run, &invocation] { invocation.exit_code = run_command(*run, invocation.programs); });
}

}  // namespace terrace
