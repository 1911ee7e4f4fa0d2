#include "daemon/doctor/examination.hpp"

#include <cstdio>
#include <memory>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"
#include "daemon/run_command.hpp"

namespace terrace {
namespace {

struct DoctorOptions {
  DaemonChoice daemon;
  std::string root = "/";
  bool json = false;
};

int doctor(const DoctorOptions& options) {
  const auto policy = policy_from(options.daemon.policy_file);
  if (!policy) return say_failure(policy.error());
  const auto socket = socket_for(options.daemon.socket, *policy);
  if (!socket) return say_failure(socket.error());
  const Machine machine(options.root);
  const auto findings = examine({machine, *policy, *socket});
  std::fputs(options.json ? (findings_json(findings) + "\n").c_str() : findings_text(findings).c_str(),
             stdout);
  return worst_of(findings) == Verdict::kFail ? kFailed : 0;
}

}  // namespace

void add_doctor(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<DoctorOptions>();
  CLI::App* command = app.add_subcommand(
      "doctor", "Check driver, memory limits, NUMA, peers and permissions; exit code 1 if something fails");
  add_daemon_options(*command, options->daemon);
  command->add_option("--root", options->root, "Where proc, sys and dev of the machine are found");
  command->add_flag("--json", options->json, "As one line of JSON");
  command->callback([options, &invocation] { invocation.exit_code = doctor(*options); });
}

}  // namespace terrace
