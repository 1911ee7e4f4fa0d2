#include <cstdio>
#include <memory>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"
#include "daemon/run_command.hpp"
#include "daemon/support/bundle.hpp"

namespace terrace {
namespace {

struct SupportOptions {
  DaemonChoice daemon;
  std::string out = "terrace-support.tar.gz";
};

int support(const SupportOptions& options) {
  const auto policy = policy_from(options.daemon.policy_file);
  if (!policy) return say_failure(policy.error());
  const auto socket = socket_for(options.daemon.socket, *policy);
  if (!socket) return say_failure(socket.error());
  const auto files =
      support_files({*policy, options.daemon.policy_file, *socket}, identity_of_this_process());
  if (const Status written = write_tar_gz(options.out, files); !written) return say_failure(written.error());
  std::printf("%s, without secrets and names of users and machines; look through it before you send it:\n%s",
              options.out.c_str(), files[0].text.c_str());
  return 0;
}

}  // namespace

void add_support(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<SupportOptions>();
  CLI::App* command = app.add_subcommand(
      "support",
      "Write what a bug report needs into an archive: versions, policy, findings, status, metrics, log");
  add_daemon_options(*command, options->daemon);
  command->add_option("--out", options->out, "The archive, a new file");
  command->callback([options, &invocation] { invocation.exit_code = support(*options); });
}

}  // namespace terrace
