#include "tests/hooks/guest_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

#include "runtime/owned_fd.hpp"

namespace terrace::test {
namespace {

struct Pipe {
  OwnedFd read, write;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    read = OwnedFd(ends[0]);
    write = OwnedFd(ends[1]);
  }
};

std::vector<std::string> merged(const std::vector<std::string>& ours) {
  std::vector<std::string> all = ours;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('=') + 1);
    bool replaced = false;
    for (const std::string& own : ours) replaced = replaced || own.compare(0, name.size(), name) == 0;
    if (!replaced) all.push_back(text);
  }
  return all;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

void drain(Pipe& out, Pipe& err, Ended& ended) {
  pollfd watched[2] = {{out.read.get(), POLLIN, 0}, {err.read.get(), POLLIN, 0}};
  std::string* const texts[2] = {&ended.out, &ended.err};
  while (watched[0].fd >= 0 || watched[1].fd >= 0) {
    if (::poll(watched, 2, -1) < 0) continue;
    for (int i = 0; i < 2; ++i) {
      if (watched[i].fd < 0 || watched[i].revents == 0) continue;
      char buffer[4096];
      const ssize_t got = ::read(watched[i].fd, buffer, sizeof buffer);
      if (got > 0) {
        texts[i]->append(buffer, static_cast<std::size_t>(got));
      } else {
        watched[i].fd = -1;
      }
    }
  }
}

}  // namespace

Ended run_program(const std::vector<std::string>& command, const std::vector<std::string>& environment) {
  Pipe out, err;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out.write.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, err.write.get(), 2);
  std::vector<std::string> arguments = command, variables = merged(environment);
  pid_t pid = 0;
  const int failed = ::posix_spawnp(&pid, command[0].c_str(), &actions, nullptr, pointers(arguments).data(),
                                    pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) throw std::runtime_error("can't start " + command[0]);
  out.write.reset();
  err.write.reset();
  Ended ended;
  drain(out, err, ended);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
  }
  ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return ended;
}

}  // namespace terrace::test
