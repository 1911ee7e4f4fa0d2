// What tests of programs need: a child process, a folder of its own, a free port, an HTTP GET, and patience.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/owned_fd.hpp"

namespace terrace::test {

// Long enough for a loaded machine under a sanitizer; nothing is timed.
inline constexpr std::chrono::seconds kPatience{60};

// Looks again and again until `holds` or patience is at its end.
inline bool eventually(const std::function<bool()>& holds, std::chrono::milliseconds patience = kPatience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

inline std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "terrace-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data()) != nullptr ? pattern : "";
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return file(name);
  }

 private:
  std::filesystem::path path_;
};

// A program with its output in files of a folder. Killed, if it still runs, when the object goes.
class ChildProcess {
 public:
  using Environment = std::vector<std::pair<std::string, std::string>>;  // an empty value unsets

  explicit ChildProcess(std::vector<std::string> command, const Environment& environment = {}) {
    std::vector<char*> argv;
    for (std::string& argument : command) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const std::string out = folder_.file("stdout"), err = folder_.file("stderr");
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::setpgid(0, 0);
    redirect("/dev/null", O_RDONLY, STDIN_FILENO);
    redirect(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, STDOUT_FILENO);
    redirect(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, STDERR_FILENO);
    for (const auto& [name, value] : environment) {
      value.empty() ? ::unsetenv(name.c_str()) : ::setenv(name.c_str(), value.c_str(), 1);
    }
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  ~ChildProcess() {
    if (!status_) {
      kill(SIGKILL);
      (void)wait();
    }
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  void kill(int signal) const { ::kill(pid_, signal); }
  [[nodiscard]] bool running() {
    if (!status_) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
    }
    return !status_.has_value();
  }
  // The exit code, or 128 + the signal; -1 where it still runs when patience is at its end.
  [[nodiscard]] int wait() {
    if (!eventually([this] { return !running(); })) return -1;
    return WIFSIGNALED(*status_) ? 128 + WTERMSIG(*status_) : WEXITSTATUS(*status_);
  }
  [[nodiscard]] std::string out() const { return text_of(folder_.path() / "stdout"); }
  [[nodiscard]] std::string err() const { return text_of(folder_.path() / "stderr"); }

 private:
  static void redirect(const char* path, int flags, int to) {
    const int fd = ::open(path, flags, 0600);
    if (fd >= 0 && fd != to) {
      ::dup2(fd, to);
      ::close(fd);
    }
  }
  TemporaryFolder folder_;
  pid_t pid_ = -1;
  std::optional<int> status_;
};

// A port of 127.0.0.1 that nothing listens on, for programs that can't choose one themselves.
inline int free_port() {
  const OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return 0;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.sin_port);
}

struct HttpAnswer {
  int status = 0;  // 0: nobody answered
  std::string body;
};

// A connection to "127.0.0.1:PORT"; not valid where nobody listens.
inline OwnedFd connect_to(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  if (colon == std::string::npos) return OwnedFd();
  OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  timeval patience{kPatience.count(), 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<std::uint16_t>(std::atoi(address.c_str() + colon + 1)));
  ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &target.sin_addr);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&target), sizeof target) != 0) return OwnedFd();
  return socket;
}

// What comes back for these bytes until the server hangs up.
inline std::string raw_http(const std::string& address, const std::string& request) {
  const OwnedFd socket = connect_to(address);
  if (!socket.valid() || ::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) return {};
  std::string reply;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::recv(socket.get(), buffer, sizeof buffer, 0)) > 0;) {
    reply.append(buffer, static_cast<std::size_t>(got));
  }
  return reply;
}

// GET http://ADDRESS/path, where ADDRESS is "127.0.0.1:PORT".
inline HttpAnswer http_get(const std::string& address, const std::string& path) {
  const std::string reply = raw_http(address, "GET " + path + " HTTP/1.0\r\nHost: " + address + "\r\n\r\n");
  const std::size_t end = reply.find("\r\n\r\n");
  const std::size_t space = reply.find(' ');
  if (end == std::string::npos || space == std::string::npos) return {};
  return {std::atoi(reply.c_str() + space), reply.substr(end + 4)};
}

// The value of one series in the Prometheus text format, named as it is printed there:
// name{label="value",...}.
inline std::optional<double> sample(const std::string& exposition, const std::string& series) {
  const std::string wanted = "\n" + series + " ";
  const std::size_t at = ("\n" + exposition).find(wanted);
  if (at == std::string::npos) return std::nullopt;
  return std::strtod(exposition.c_str() + at + wanted.size() - 1, nullptr);
}

}  // namespace terrace::test
