// terraced: the daemon of a node.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string>

#include "daemon/manual/manual_page.hpp"
#include "daemon/serve_options.hpp"
#include "daemon/server.hpp"
#include "daemon/service_notice.hpp"
#include "daemon/version.hpp"

namespace {

using namespace terrace;

Server* running = nullptr;  // for the signal handler
void stop_running(int) { running->stop(); }
void reload_running(int) { running->reload(); }

void handle_signals() {
  struct sigaction action {};
  action.sa_handler = stop_running;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
  action.sa_handler = reload_running;
  ::sigaction(SIGHUP, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

// From here on the server goes: a second Ctrl-C finds nobody.
void ignore_signals() {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) std::signal(signal, SIG_IGN);
}

// Every connection takes a socket and a handle of the process behind it: as many as the system allows.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 8192);
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

int fail(const Error& error) {
  std::fprintf(stderr, "terraced: %s\n", error.text.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"terraced shares a node's memory between training processes and serves their metrics.",
               "terraced"};
  ServeCommandLine line;
  app.set_version_flag("--version", std::string(kVersion));
  add_manual_option(app, kTerracedManual);
  app.add_option("--policy", line.policy, "Policy file");
  app.add_option("--socket", line.socket, "Unix socket to listen on; else daemon.socket of the policy");
  app.add_option("--listen", line.listen, "ADDRESS:PORT for /metrics; port 0: any free one");
  app.add_option("--hbm", line.hbm, "HBM to lease of each device, bytes or \"24GiB\"; else hbm.budget");
  app.add_option("--ddr", line.ddr, "Pinned host memory to lease, bytes or \"24GiB\"; else ddr.budget");
  app.add_option("--exit-when-idle", line.exit_when_idle, "End when nobody was connected for so many seconds")
      ->check(CLI::Range(0.0, 1e6));
  CLI11_PARSE(app, argc, argv);

  raise_descriptor_limit();
  auto options = serve_options(line);
  if (!options) return fail(options.error());
  spdlog::set_default_logger(spdlog::stderr_logger_mt("terraced"));
  spdlog::flush_on(spdlog::level::info);
  options->notice = ServiceNotice::from_environment();
  auto server = Server::open(std::move(*options));
  if (!server) return fail(server.error());
  running = server->get();
  handle_signals();
  spdlog::info("listening; metrics at {}", (*server)->listen_address());
  const Status ended = (*server)->run();
  ignore_signals();
  if (!ended) return fail(ended.error());
  spdlog::info("stopped");
  return 0;
}
