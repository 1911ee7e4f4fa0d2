#include "daemon/child_run.hpp"

#include <fcntl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/owned_fd.hpp"

namespace terrace {
namespace {

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

[[noreturn]] void become(const ChildRun& run, const sigset_t& mask, int report) {
  std::vector<char*> argv;
  for (const std::string& argument : run.command) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  for (const auto& [name, value] : run.environment) ::setenv(name.c_str(), value.c_str(), 1);
  if (!run.pid_variable.empty()) ::setenv(run.pid_variable.c_str(), std::to_string(::getpid()).c_str(), 1);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execvp(argv[0], argv.data());
  const int failed = errno;
  [[maybe_unused]] const ssize_t written = ::write(report, &failed, sizeof failed);
  ::_exit(failed == ENOENT ? 127 : 126);
}

void pass_on(int signals, pid_t child) {
  signalfd_siginfo info{};
  if (::read(signals, &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return;
  if (info.ssi_signo == SIGCHLD || info.ssi_code == SI_KERNEL) return;
  ::kill(child, static_cast<int>(info.ssi_signo));
}

int wait_for(int signals, pid_t child) {
  for (;;) {
    int status = 0;
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended < 0) return 126;  // somebody ignores SIGCHLD: the status is lost
    if (ended == child) return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    pass_on(signals, child);
  }
}

}  // namespace

int run_child(const ChildRun& run) {
  sigset_t watched, before;
  sigemptyset(&watched);
  for (const int number : kForwarded) sigaddset(&watched, number);
  sigaddset(&watched, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &watched, &before);
  const OwnedFd signals(::signalfd(-1, &watched, SFD_CLOEXEC));
  int report[2] = {-1, -1};
  const bool piped = ::pipe2(report, O_CLOEXEC) == 0;
  const OwnedFd reading(report[0]);
  OwnedFd writing(report[1]);
  const pid_t child = signals.valid() && piped ? ::fork() : -1;
  if (child < 0) {
    std::fprintf(stderr, "terrace: cannot start %s: %s\n", run.command[0].c_str(), std::strerror(errno));
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    return 126;
  }
  if (child == 0) become(run, before, writing.get());
  writing.reset();
  int failed = 0;
  if (::read(reading.get(), &failed, sizeof failed) == static_cast<ssize_t>(sizeof failed)) {
    std::fprintf(stderr, "terrace: %s: %s\n", run.command[0].c_str(),
                 failed == ENOENT ? "command not found" : std::strerror(failed));
  }
  const int code = wait_for(signals.get(), child);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  return code;
}

}  // namespace terrace
