// terrace: the command a user types.
#include <filesystem>
#include <string>

#include "daemon/commands/commands.hpp"
#include "daemon/manual/manual_page.hpp"
#include "daemon/version.hpp"

namespace {

using namespace terrace;

std::filesystem::path folder_of_programs() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Terrace lets a training process use more memory than its GPU has.", "terrace"};
  app.require_subcommand(1);
  app.set_version_flag("--version", std::string(kVersion));
  add_manual_option(app, kTerraceManual);

  Invocation invocation{.programs = folder_of_programs()};
  add_run(app, invocation);
  add_check(app, invocation);
  add_status(app, invocation);
  add_top(app, invocation);
  add_history(app, invocation);
  add_advise(app, invocation);
  add_doctor(app, invocation);
  add_support(app, invocation);
  add_reload(app, invocation);
  add_off(app, invocation);
  add_replay(app, invocation);
  add_metrics_doc(app, invocation);
  add_completion(app, invocation);

  CLI11_PARSE(app, argc, argv);
  return invocation.exit_code;
}
