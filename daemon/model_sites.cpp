#include "daemon/model_sites.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "runtime/owned_fd.hpp"

namespace terrace {
namespace {

constexpr const char* kTrainer = "moe_trainer";

Error failure(Errc code, std::string text) { return Error{code, std::move(text), {}, {}}; }

std::optional<SiteKind> kind_named(const std::string& name) {
  for (int kind = 0; kind < kSiteKindCount; ++kind) {
    if (name == name_of(static_cast<SiteKind>(kind))) return static_cast<SiteKind>(kind);
  }
  return std::nullopt;
}

std::string read_all(const OwnedFd& from) {
  std::string text;
  char buffer[16384];
  for (;;) {
    const ssize_t got = ::read(from.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return text;
    text.append(buffer, static_cast<std::size_t>(got));
  }
}

// A child whose standard output goes to `out`; or the errno that kept it from starting.
struct Started {
  pid_t child = 0;
  int failed = 0;
};
Started start(std::vector<std::string> command, const OwnedFd& out) {
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out.get(), STDOUT_FILENO);
  Started started;
  started.failed = ::posix_spawnp(&started.child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  return started;
}

int exit_status(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

}  // namespace

Result<std::vector<SiteSpec>> sites_from_json(std::string_view json) {
  const auto document = nlohmann::json::parse(json, nullptr, false);
  const Error other =
      failure(Errc::kProtocol, std::string(kTrainer) + " printed no list of sites; use terrace and " +
                                   kTrainer + " of one version");
  if (!document.is_object() || !document.contains("sites") || !document["sites"].is_array()) return other;
  std::vector<SiteSpec> sites;
  for (const auto& entry : document["sites"]) {
    const auto has = [&entry](const char* key) { return entry.contains(key) && entry[key].is_string(); };
    if (!entry.is_object() || !has("name") || !has("kind") || !has("group")) return other;
    if (!entry.contains("layer") || !entry["layer"].is_number_integer()) return other;
    const auto kind = kind_named(entry["kind"].get<std::string>());
    if (!kind) return other;
    sites.push_back({.name = entry["name"].get<std::string>(),
                     .kind = *kind,
                     .layer = entry["layer"].get<int>(),
                     .group = entry["group"].get<std::string>()});
  }
  return sites;
}

Result<std::vector<SiteSpec>> sites_of_model(const std::string& model,
                                             const std::filesystem::path& programs) {
  const std::filesystem::path beside = programs / kTrainer;
  const std::string program = ::access(beside.c_str(), X_OK) == 0 ? beside.string() : kTrainer;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    return failure(Errc::kIo, std::string("cannot make a pipe: ") + std::strerror(errno));
  const OwnedFd from(ends[0]);
  OwnedFd to(ends[1]);
  const Started started = start({program, "--sites", "--config", model}, to);
  if (started.failed == ENOENT) {
    return failure(Errc::kNotFound, std::string("--explain asks ") + kTrainer +
                                        " for the sites, and it is neither in " + programs.string() +
                                        " nor in PATH; build or install it");
  }
  if (started.failed != 0)
    return failure(Errc::kIo, program + ": cannot be run: " + std::strerror(started.failed));
  to.reset();
  const std::string printed = read_all(from);
  const int status = exit_status(started.child);
  if (!WIFEXITED(status)) return failure(Errc::kIo, program + ": ended by a signal");
  if (WEXITSTATUS(status) != 0) return failure(Errc::kInvalidArgument, "");
  return sites_from_json(printed);
}

}  // namespace terrace
