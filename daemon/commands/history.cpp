#include "daemon/history.hpp"

#include <cstdio>
#include <memory>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"

namespace terrace {
namespace {

struct HistoryOptions {
  DaemonChoice daemon;
  std::string file;
  bool json = false;
};

int history(const HistoryOptions& options) {
  if (!options.file.empty()) {
    const auto text = file_history(options.file);
    if (!text) return say_failure(text.error());
    std::fputs(text->c_str(), stdout);
    return 0;
  }
  auto observer = connect(options.daemon);
  if (!observer) return say_failure(observer.error());
  const auto reply = observer->status(0);
  if (!reply) return say_failure(reply.error());
  const auto status = node_status(*reply);
  if (!status) return say_failure(status.error());
  const auto runs = ended_runs(status->ended);
  std::fputs(options.json ? (history_json(runs) + "\n").c_str() : history_text(runs).c_str(), stdout);
  return 0;
}

}  // namespace

void add_history(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<HistoryOptions>();
  CLI::App* command =
      app.add_subcommand("history", "Show runs that have ended: the daemon's, or one in a file");
  CLI::Option* file =
      command->add_option("file", options->file, "A file of moe_trainer --json or of terrace run --record");
  add_daemon_options(*command, options->daemon);
  command->add_flag("--json", options->json, "As one line of JSON")->excludes(file);
  command->callback([options, &invocation] { invocation.exit_code = history(*options); });
}

}  // namespace terrace
