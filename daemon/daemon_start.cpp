#include "daemon/daemon_start.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

namespace terrace {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStartPatience{10000};
constexpr milliseconds kFarewellPatience{2000};
constexpr milliseconds kPause{20};

std::vector<std::string> arguments_of(const DaemonStart& start) {
  std::vector<std::string> arguments{start.program.string(), "--socket", start.socket, "--exit-when-idle",
                                     std::to_string(start.idle_seconds)};
  if (!start.listen.empty()) arguments.insert(arguments.end(), {"--listen", start.listen});
  if (!start.policy.empty()) arguments.insert(arguments.end(), {"--policy", start.policy});
  return arguments;
}

// In a session of its own, so that a terminal's signals don't reach it, with nothing of ours open.
Result<pid_t> spawn(const DaemonStart& start, const std::string& log) {
  std::vector<std::string> arguments = arguments_of(start);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const OwnedFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  OwnedFd to_log(::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
  const int errors = to_log.valid() ? to_log.get() : nothing.get();
  const pid_t child = ::fork();
  if (child < 0) return Error{Errc::kIo, std::string("fork: ") + std::strerror(errno)};
  if (child == 0) {
    ::setsid();
    ::dup2(nothing.get(), STDIN_FILENO);
    ::dup2(nothing.get(), STDOUT_FILENO);
    ::dup2(errors, STDERR_FILENO);
    ::close_range(STDERR_FILENO + 1, ~0U, 0);
    if (::chdir("/") != 0) ::_exit(126);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  return child;
}

std::string last_line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line, last;
  while (std::getline(file, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

// A daemon that stops for want of clients hangs up on the one who comes at that moment: that is no answer
// yet.
Result<Observer> join_once_settled(const std::string& socket) {
  const auto deadline = std::chrono::steady_clock::now() + kFarewellPatience;
  auto joined = Observer::connect(socket);
  while (!joined && joined.error().code == Errc::kIo && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPause);
    joined = Observer::connect(socket);
  }
  return joined;
}

}  // namespace

Result<Observer> join_or_start_daemon(const DaemonStart& start) {
  auto joined = join_once_settled(start.socket);
  if (joined || joined.error().code != Errc::kNotFound) return joined;
  std::error_code error;
  if (!std::filesystem::exists(start.program, error)) {
    return Error{Errc::kNotFound, start.program.string() + " is missing"};
  }
  const std::filesystem::path folder = std::filesystem::absolute(start.socket, error).parent_path();
  std::filesystem::create_directories(folder, error);
  const std::string log = (folder / "terraced.log").string();
  const auto child = spawn(start, log);
  if (!child) return child.error();
  bool ended = false;
  const auto deadline = std::chrono::steady_clock::now() + kStartPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    joined = Observer::connect(start.socket);
    if (joined) return joined;
    if (ended) break;  // and nobody else has started one in the meantime
    int status = 0;
    ended = ::waitpid(*child, &status, WNOHANG) == *child;
    std::this_thread::sleep_for(kPause);
  }
  const std::string said = last_line_of(log);
  return Error{Errc::kIo, said.empty() ? "terraced does not answer at " + start.socket : said};
}

}  // namespace terrace
