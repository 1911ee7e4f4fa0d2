#include "daemon/advice.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "daemon/commands/commands.hpp"
#include "daemon/commands/daemon_choice.hpp"

namespace terrace {
namespace {

using Clock = std::chrono::steady_clock;

struct AdviseOptions {
  DaemonChoice daemon;
  std::string job;
  std::uint64_t steps = 3;
  double patience_seconds = 600;
};

Result<NodeStatus> look(Observer& observer) {
  const auto reply = observer.status(0);
  if (!reply) return reply.error();
  return node_status(*reply);
}

// The job meant: by its name, or the only one.
Result<JobStatus> chosen(const NodeStatus& status, const std::string& name) {
  std::string names;
  for (const JobStatus& job : status.jobs) {
    if (job.job == name || (name.empty() && status.jobs.size() == 1)) return job;
    names += (names.empty() ? "" : ", ") + job.job;
  }
  if (names.empty())
    return Error{Errc::kNotFound, "no job is running; start one with: terrace run -- CMD..."};
  if (name.empty()) return Error{Errc::kInvalidArgument, "several jobs run: name one with --job: " + names};
  return Error{Errc::kNotFound, "no job \"" + name + "\" is running; these are: " + names};
}

Counts free_of(const NodeStatus& status) {
  Counts free;
  for (const auto& [tier, budget] : status.budget.all())
    free.set(tier, budget - std::min(budget, status.leased[tier]));
  return free;
}

int advise(const AdviseOptions& options) {
  auto observer = connect(options.daemon);
  if (!observer) return say_failure(observer.error());
  auto status = look(*observer);
  if (!status) return say_failure(status.error());
  auto first = chosen(*status, options.job);
  if (!first) return say_failure(first.error());
  const auto deadline = Clock::now() + std::chrono::duration<double>(options.patience_seconds);
  Watched watched{.before = *first, .after = *first, .node_free = {}};
  while (watched.after.steps <
         watched.before.steps + options.steps * std::max<std::uint64_t>(watched.after.processes, 1)) {
    if (Clock::now() >= deadline) {
      const std::string text = "job \"" + first->job + "\" did not finish " + std::to_string(options.steps) +
                               " steps in " + std::to_string(static_cast<int>(options.patience_seconds)) +
                               " s; only training processes that use Swap Core count steps";
      return say_failure({Errc::kTimeout, text});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    status = look(*observer);
    if (!status) return say_failure(status.error());
    auto again = chosen(*status, first->job);
    if (!again)
      return say_failure({Errc::kNotFound, "job \"" + first->job + "\" ended while it was watched"});
    watched.after = std::move(*again);
    // Processes have come or gone, and their counters with them: from here anew.
    if (watched.after.processes != watched.before.processes || watched.after.steps < watched.before.steps)
      watched.before = watched.after;
  }
  watched.node_free = free_of(*status);
  std::fputs(advice_text(terrace::advise(watched)).c_str(), stdout);
  return 0;
}

}  // namespace

void add_advise(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<AdviseOptions>();
  CLI::App* command = app.add_subcommand(
      "advise",
      "Watch a running job for some steps, and say what there is to gain and which policy would do it");
  add_daemon_options(*command, options->daemon);
  command->add_option("--job", options->job, "Which job; else the only one");
  command->add_option("--steps", options->steps, "How many steps of each process to watch")
      ->check(CLI::Range(1, 1000));
  command->add_option("--patience", options->patience_seconds, "Give up after so many seconds")
      ->check(CLI::Range(0.1, 86400.0));
  command->callback([options, &invocation] { invocation.exit_code = advise(*options); });
}

}  // namespace terrace
