#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "daemon/commands/commands.hpp"
#include "daemon/explanation.hpp"
#include "daemon/model_sites.hpp"
#include "daemon/policy_summary.hpp"
#include "daemon/run_command.hpp"
#include "swapcore/policy/rule_report.hpp"

namespace terrace {
namespace {

struct CheckOptions {
  std::vector<std::string> files;
  std::string model;  // empty: not to be explained
};

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
int explain(CheckOptions options, const std::filesystem::path& programs) {
  const auto sites = sites_of_model(options.model, programs);
  if (!sites) {
    if (!sites.error().text.empty()) std::fprintf(stderr, "terrace: %s\n", sites.error().text.c_str());
    return sites.error().code == Errc::kInvalidArgument ? kRefused : kFailed;
  }
  const char* set = std::getenv("TERRACE_POLICY");
  if (options.files.empty()) options.files.emplace_back(set != nullptr ? set : "");
  int code = 0;
  for (const std::string& file : options.files) {
    const auto policy = policy_from(file);
    if (!policy) std::fprintf(stderr, "%s\n", policy.error().text.c_str());
    if (policy && options.files.size() > 1) std::printf("%s:\n", file.c_str());
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

}  // namespace

void add_check(CLI::App& app, Invocation& invocation) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand("check", "Say what policy files mean, or what is wrong with them");
  command->add_option("files", options->files, "Policy files");
  const CLI::Option* explained =
      command->add_option("--explain", options->model,
                          "List the sites of this model (a configuration of moe_trainer, or a public "
                          "model's config.json) with the "
                          "rule that decides each");
  command->callback([options, explained, &invocation] {
    if (explained->count() > 0) {
      invocation.exit_code = explain(*options, invocation.programs);
    } else if (options->files.empty()) {
      std::fputs("terrace: check: name a policy file, or a model with --explain\n", stderr);
      invocation.exit_code = kRefused;
    } else {
      invocation.exit_code = check(options->files);
    }
  });
}

}  // namespace terrace
