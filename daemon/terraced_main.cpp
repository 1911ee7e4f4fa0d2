// terraced: the daemon of a node.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <string>

#include "daemon/server.hpp"
#include "daemon/socket_path.hpp"
#include "daemon/version.hpp"
#include "runtime/memory_limits.hpp"
#include "swapcore/policy/policy.hpp"

namespace {

using namespace terrace;

struct CommandLine {
  std::string policy, socket, listen, hbm, ddr;
  double exit_when_idle = -1;
};

Server* running = nullptr;  // for the signal handler
void stop_running(int) { running->stop(); }

// "24GiB", or a plain count of bytes.
Result<Bytes> bytes_from(const std::string& text) {
  const bool digits = !text.empty() && text.size() < 19 &&
                      std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); });
  if (digits) return Bytes(std::stoull(text));
  return parse_bytes(text);
}

Result<Server::Options> options_from(const CommandLine& line) {
  const auto policy = line.policy.empty() ? Result<Policy>(Policy{}) : load_policy(line.policy);
  if (!policy) return policy.error();
  Server::Options options;
  const auto socket =
      line.socket.empty() ? choose_socket(policy->daemon.socket) : Result<std::string>(line.socket);
  if (!socket) return socket.error();
  options.socket = *socket;
  options.listen = line.listen.empty() ? policy->metrics.listen : line.listen;
  options.registry.hbm_budget = policy->hbm.budget;
  if (policy->hbm.budget.form == Amount::Form::kBytes)
    options.registry.hbm_per_device = policy->hbm.budget.bytes;
  const auto limits = memory_limits();
  const Bytes host =
      limits ? limits->usable : Bytes();  // unknown: no DDR to lease but what is named in bytes
  Bytes ddr = policy->ddr.budget.resolve(host, host / 2);
  if (!line.hbm.empty()) {
    const auto bytes = bytes_from(line.hbm);
    if (!bytes) return Error{bytes.error().code, "--hbm: " + bytes.error().text};
    options.registry.hbm_per_device = *bytes;
  }
  if (!line.ddr.empty()) {
    const auto bytes = bytes_from(line.ddr);
    if (!bytes) return Error{bytes.error().code, "--ddr: " + bytes.error().text};
    ddr = *bytes;
  }
  options.registry.node_budgets[static_cast<std::size_t>(TierId::kDdr)] = ddr;
  if (line.exit_when_idle >= 0) {
    options.exit_when_idle = std::chrono::milliseconds(static_cast<std::int64_t>(line.exit_when_idle * 1000));
  }
  return options;
}

void handle_signals() {
  struct sigaction action {};
  action.sa_handler = stop_running;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

int fail(const Error& error) {
  std::fprintf(stderr, "terraced: %s\n", error.text.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"terraced shares a node's memory between training processes and serves their metrics."};
  CommandLine line;
  app.set_version_flag("--version", std::string(kVersion));
  app.add_option("--policy", line.policy, "Policy file");
  app.add_option("--socket", line.socket, "Unix socket to listen on; else daemon.socket of the policy");
  app.add_option("--listen", line.listen, "ADDRESS:PORT for /metrics; port 0: any free one");
  app.add_option("--hbm", line.hbm, "HBM to lease of each device, bytes or \"24GiB\"; else hbm.budget");
  app.add_option("--ddr", line.ddr, "Pinned host memory to lease, bytes or \"24GiB\"; else ddr.budget");
  app.add_option("--exit-when-idle", line.exit_when_idle, "End when nobody was connected for so many seconds")
      ->check(CLI::Range(0.0, 1e6));
  CLI11_PARSE(app, argc, argv);

  auto options = options_from(line);
  if (!options) return fail(options.error());
  spdlog::set_default_logger(spdlog::stderr_logger_mt("terraced"));
  spdlog::flush_on(spdlog::level::info);
  auto server = Server::open(std::move(*options));
  if (!server) return fail(server.error());
  running = server->get();
  handle_signals();
  spdlog::info("listening; metrics at {}", (*server)->listen_address());
  if (Status ended = (*server)->run(); !ended) return fail(ended.error());
  spdlog::info("stopped");
  return 0;
}
