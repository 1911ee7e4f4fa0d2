#include "daemon/run_command.hpp"

#include <sys/random.h>

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "daemon/child_run.hpp"
#include "daemon/daemon_start.hpp"
#include "daemon/hook_environment.hpp"
#include "daemon/python_start.hpp"
#include "daemon/record_target.hpp"
#include "daemon/socket_path.hpp"
#include "daemon/version.hpp"
#include "runtime/shared_page.hpp"

namespace terrace {
namespace {

namespace fs = std::filesystem;

std::uint64_t new_run() {
  std::uint64_t run = 0;
  if (::getrandom(&run, sizeof run, 0) != static_cast<ssize_t>(sizeof run)) run = 0;
  return run | 1;  // zero means none
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// Installed, or as the build lays it out; empty where it is in neither place.
fs::path preload_library(const fs::path& programs) {
  std::error_code error;
  for (const char* folder : {kLibrariesFromPrograms, "../lib"}) {
    const fs::path library = (programs / folder / "libterrace_preload.so").lexically_normal();
    if (fs::exists(library, error)) return library;
  }
  return {};
}

ChildRun child_of(const RunOptions& options, const std::string& socket, std::uint64_t run,
                  const fs::path& programs, Environment environment) {
  ChildRun child;
  child.command = options.command;
  child.environment = std::move(environment);
  child.environment.emplace_back("TERRACE_SOCKET", socket);
  child.environment.emplace_back("TERRACE_RUN", hex(run));
  const std::string name =
      options.job.empty() ? fs::path(options.command[0]).filename().string() : options.job;
  child.environment.emplace_back("TERRACE_JOB", clean_job_name(name));
  std::error_code error;
  if (!options.policy_file.empty()) {
    child.environment.emplace_back("TERRACE_POLICY", fs::absolute(options.policy_file, error).string());
  }
  if (!options.record.empty()) {
    child.environment.emplace_back("TERRACE_RECORD", fs::absolute(options.record, error).string());
    child.pid_variable = "TERRACE_RECORD_PID";
  }
  const fs::path preload = preload_library(programs);
  if (!preload.empty()) {
    const char* before = std::getenv("LD_PRELOAD");
    const bool more = before != nullptr && *before != '\0';
    child.environment.emplace_back("LD_PRELOAD", preload.string() + (more ? std::string(":") + before : ""));
  }
  const std::string python = python_path(programs, std::getenv("PYTHONPATH"));
  if (!python.empty()) child.environment.emplace_back("PYTHONPATH", python);
  return child;
}

// The daemon may be another than the one at the start: clients tell a successor all they have counted.
Result<std::string> status_at_end(std::optional<Observer>& observer, const std::string& socket,
                                  std::uint64_t run) {
  if (observer) {
    auto status = observer->status(run);
    if (status) return status;
  }
  auto again = Observer::connect(socket);
  if (!again) return again.error();
  return again->status(run);
}

}  // namespace

Result<Policy> policy_from(const std::string& file) { return file.empty() ? Policy{} : load_policy(file); }

Result<std::string> socket_for(const std::string& given, const Policy& policy) {
  std::error_code error;
  if (!given.empty()) return fs::absolute(given, error).string();
  const char* set = std::getenv("TERRACE_SOCKET");
  if (set != nullptr && *set != '\0') return std::string(set);
  return choose_socket(policy.daemon.socket);
}

namespace {

// What the preload library did; nothing where it did nothing.
template <typename Number>
std::string hook_report(const Number& number) {
  const std::uint64_t passed = number("passthrough_calls"), refused = number("refused_allocations");
  if (passed == 0 && refused == 0) return {};
  std::string text = "terrace: passed " + std::to_string(passed) + " calls through, refused " +
                     std::to_string(refused) + " allocations";
  if (refused > 0) text += " of " + format_bytes(Bytes(number("refused_bytes"))) + " together";
  const std::uint64_t unknown = number("unknown_frees");
  return text + (unknown > 0 ? "; " + std::to_string(unknown) + " frees of memory not seen before\n" : "\n");
}

}  // namespace

std::string memory_report(const std::string& status_json) {
  const auto json = nlohmann::json::parse(status_json, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("run")) return {};
  const auto& run = json["run"];
  const auto processes = run.value("processes", std::uint64_t{0});
  if (processes == 0) return {};
  const auto number = [&](const char* key) { return run.value(key, std::uint64_t{0}); };
  const auto bytes = [&](const char* key) { return format_bytes(Bytes(number(key))); };
  char stalls[32];
  std::snprintf(stalls, sizeof stalls, "%.3f s", run.value("stall_seconds", 0.0));
  const std::string of =
      processes == 1 ? "" : " (the largest of " + std::to_string(processes) + " processes)";
  return "terrace: HBM peak " + bytes("hbm_peak_bytes") + ", DDR peak " + bytes("ddr_peak_bytes") + of +
         "; moved " + bytes("transfer_bytes") + "\n" + "terrace: cache " +
         std::to_string(number("cache_hits")) + " hits, " + std::to_string(number("cache_misses")) +
         " misses, " + std::to_string(number("cache_late")) + " late; stalled " + stalls + " in " +
         std::to_string(number("steps")) + " steps\n" + hook_report(number);
}

int run_command(const RunOptions& options, const fs::path& programs) {
  const auto policy = policy_from(options.policy_file);
  if (!policy) {
    std::fprintf(stderr, "terrace: %s\n", policy.error().text.c_str());
    return 2;
  }
  if (!options.record.empty()) {
    if (const Status ready = prepare_record_target(options.record); !ready) {
      std::fprintf(stderr, "terrace: %s\n", ready.error().text.c_str());
      return 2;
    }
  }
  const auto allocator = guest_allocator_named(options.allocator);
  auto environment =
      allocator ? hook_environment(*policy, *allocator) : Result<Environment>(allocator.error());
  if (!environment) {
    std::fprintf(stderr, "terrace: %s\n", environment.error().text.c_str());
    return 2;
  }
  std::error_code error;
  DaemonStart start;
  start.program = programs / "terraced";
  start.listen = options.listen;
  start.policy = options.policy_file.empty() ? "" : fs::absolute(options.policy_file, error).string();
  std::optional<Observer> observer;
  Result<std::string> socket = socket_for(options.socket, *policy);
  std::string why = socket ? "" : socket.error().text;
  if (socket) {
    start.socket = *socket;
    auto joined = join_or_start_daemon(start);
    if (joined) observer.emplace(std::move(*joined));
    if (!joined) why = joined.error().text;
  }
  if (!observer) std::fprintf(stderr, "terrace: no daemon (%s): running without\n", why.c_str());
  std::fputs(isolated_python_notice(options.command, programs).c_str(), stderr);
  const std::uint64_t run = new_run();
  // An empty socket in the environment says that there is none, so that nobody complains a second time.
  const int code =
      run_child(child_of(options, observer ? start.socket : "", run, programs, *std::move(environment)));
  if (observer) {
    const auto status = status_at_end(observer, start.socket, run);
    if (status) std::fputs(memory_report(*status).c_str(), stderr);
  }
  if (!options.record.empty()) std::fputs(record_notice(options.record).c_str(), stderr);
  return code;
}

}  // namespace terrace
