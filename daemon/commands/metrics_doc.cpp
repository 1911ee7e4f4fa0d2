#include <cstdio>

#include "daemon/commands/commands.hpp"
#include "runtime/metrics.hpp"

namespace terrace {

void add_metrics_doc(CLI::App& app, Invocation&) {
  CLI::App* command = app.add_subcommand("metrics-doc", "Print docs/METRICS.md");
  command->callback([] { std::fputs(metrics_document().c_str(), stdout); });
}

}  // namespace terrace
