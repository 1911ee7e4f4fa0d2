// terrace: the command a user types.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "daemon/explanation.hpp"
#include "daemon/model_sites.hpp"
#include "daemon/observer.hpp"
#include "daemon/policy_summary.hpp"
#include "daemon/replay_command.hpp"
#include "daemon/run_command.hpp"
#include "daemon/status_text.hpp"
#include "daemon/version.hpp"
#include "runtime/metrics.hpp"
#include "swapcore/policy/rule_report.hpp"

namespace {

using namespace terrace;

constexpr int kRefused = 2;

std::filesystem::path folder_of_programs() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
}

// What the policy says of each site of a model.
int explain(const Policy& policy, const std::vector<SiteSpec>& sites) {
  const RuleReport report = report_rules(policy, sites);
  for (const std::string& warning : report.warnings) std::fprintf(stderr, "%s\n", warning.c_str());
  if (report.conflict) {
    std::fprintf(stderr, "%s\n", report.conflict->text.c_str());
    return kRefused;
  }
  std::fputs(explanation(policy, sites).c_str(), stdout);
  return 0;
}

// The sites of a model under each policy, or under the one that a training run would take.
int explain(const std::string& model, std::vector<std::string> files) {
  const auto sites = sites_of_model(model, folder_of_programs());
  if (!sites) {
    if (!sites.error().text.empty()) std::fprintf(stderr, "terrace: %s\n", sites.error().text.c_str());
    return sites.error().code == Errc::kInvalidArgument ? kRefused : 1;
  }
  const char* set = std::getenv("TERRACE_POLICY");
  if (files.empty()) files.emplace_back(set != nullptr ? set : "");
  int code = 0;
  for (const std::string& file : files) {
    const auto policy = policy_from(file);
    if (!policy) std::fprintf(stderr, "%s\n", policy.error().text.c_str());
    if (policy && files.size() > 1) std::printf("%s:\n", file.c_str());
    if (!policy || explain(*policy, *sites) != 0) code = kRefused;
  }
  return code;
}

// Every file is checked, also after one was refused.
int check(const std::vector<std::string>& files) {
  int code = 0;
  for (const std::string& file : files) {
    const auto policy = load_policy(file);
    if (policy) {
      std::printf("%s: ok\n%s", file.c_str(), policy_summary(*policy).c_str());
    } else {
      std::fprintf(stderr, "%s\n", policy.error().text.c_str());
      code = kRefused;
    }
  }
  return code;
}

int fail(const Error& error) {
  std::fprintf(stderr, "terrace: %s\n", error.text.c_str());
  return 1;
}

// How a command finds the daemon.
struct DaemonPlace {
  std::string socket, policy;
  void add_to(CLI::App& app) {
    app.add_option("--socket", socket, "Socket of the daemon");
    app.add_option("--policy", policy, "Policy file that names the socket");
  }
  [[nodiscard]] Result<Observer> observer() const {
    const auto read = policy_from(policy);
    if (!read) return read.error();
    const auto found = socket_for(socket, *read);
    return found ? Observer::connect(*found) : Result<Observer>(found.error());
  }
};

int reload(const DaemonPlace& place) {
  auto observer = place.observer();
  if (!observer) return fail(observer.error());
  if (Status done = observer->reload(); !done) return fail(done.error()), kRefused;
  return 0;
}

int steer(const DaemonPlace& place, int pid, Course course) {
  auto observer = place.observer();
  if (!observer) return fail(observer.error());
  if (Status done = observer->steer(pid, course); !done) return fail(done.error());
  return 0;
}

enum class StatusForm { kText, kJson };

int status(const DaemonPlace& place, StatusForm form) {
  auto observer = place.observer();
  if (!observer) return fail(observer.error());
  const auto reply = observer->status(0);
  if (!reply) return fail(reply.error());
  std::fputs(form == StatusForm::kJson ? (*reply + "\n").c_str() : status_text(*reply).c_str(), stdout);
  return 0;
}

CLI::App* add_replay(CLI::App& app, ReplayOptions& replay) {
  CLI::App* command = app.add_subcommand("replay", "Replay a recorded trace against an allocator");
  command->add_option("trace", replay.trace, "File of `terrace run --record`, also with gzip")->required();
  command->add_option("--allocator", replay.allocator, "terrace, baseline (none), or a plugin's FILE.so");
  command->add_option("--device", replay.device, "auto, cuda or emulated");
  command->add_option("--budget", replay.budget, "Bytes that the allocator may hold; else the device's");
  return command;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Terrace lets a training process use more memory than its GPU has."};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string(kVersion));

  RunOptions run;
  CLI::App* run_app =
      app.add_subcommand("run", "Run a command with a daemon at its side: terrace run -- CMD...");
  run_app->add_option("--policy", run.policy_file, "Policy file");
  run_app->add_option("--socket", run.socket, "Socket of the daemon");
  run_app->add_option("--listen", run.listen, "Address for metrics, where a daemon is started");
  run_app->add_option("--job", run.job, "Name of the job in the metrics; else the command's name");
  run_app->add_option("--record", run.record,
                      "Write a trace of the command's device allocations to this file");
  run_app->add_option("command", run.command, "The command and its arguments")->required();
  run_app->positionals_at_end();

  std::vector<std::string> files;
  CLI::App* check_app = app.add_subcommand("check", "Say what policy files mean, or what is wrong with them");
  std::string model;
  check_app->add_option("files", files, "Policy files");
  const CLI::Option* explained =
      check_app->add_option("--explain", model,
                            "List the sites of this model (a configuration of moe_trainer, or a public "
                            "model's config.json) with the "
                            "rule that decides each");

  DaemonPlace place;
  bool json = false;
  CLI::App* status_app = app.add_subcommand("status", "Show the daemon's clients and leases");
  place.add_to(*status_app);
  status_app->add_flag("--json", json, "As one line of JSON");

  CLI::App* reload_app = app.add_subcommand("reload", "Have the daemon read its policy anew");
  place.add_to(*reload_app);

  int pid = 0;
  bool on = false;
  CLI::App* off_app =
      app.add_subcommand("off", "Switch Terrace off for a live process: its new work goes without");
  off_app->add_option("pid", pid, "The process, as `terrace status` lists it")->required();
  off_app->add_flag("--undo", on, "Switch it on again");
  place.add_to(*off_app);

  ReplayOptions replay;
  bool replay_json = false;
  CLI::App* replay_app = add_replay(app, replay);
  replay_app->add_flag("--json", replay_json, "As one line of JSON");

  CLI::App* document_app = app.add_subcommand("metrics-doc", "Print docs/METRICS.md");

  CLI11_PARSE(app, argc, argv);
  if (*run_app) return run_command(run, folder_of_programs());
  if (*check_app && explained->count() > 0) return explain(model, files);
  if (*check_app && files.empty()) {
    std::fputs("terrace: check: name a policy file, or a model with --explain\n", stderr);
    return kRefused;
  }
  if (*check_app) return check(files);
  if (*status_app) return status(place, json ? StatusForm::kJson : StatusForm::kText);
  if (*reload_app) return reload(place);
  if (*off_app) return steer(place, pid, on ? Course::kTiering : Course::kPassthrough);
  if (*replay_app) {
    replay.form = replay_json ? ReportForm::kJson : ReportForm::kText;
    return replay_command(replay);
  }
  if (*document_app) std::fputs(metrics_document().c_str(), stdout);
  return 0;
}
