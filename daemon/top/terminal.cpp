#include "daemon/top/terminal.hpp"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace terrace {
namespace {

// The other screen, no cursor, no wrapping at the right edge; and back.
constexpr std::string_view kEnter = "\033[?1049h\033[?25l\033[?7l\033[2J";
constexpr std::string_view kLeave = "\033[?7h\033[?25h\033[?1049l";

void write_all(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the terminal has gone: SIGHUP follows
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

sigset_t watched_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) ::sigaddset(&set, signal);
  return set;
}

}  // namespace

Result<Terminal> Terminal::open() {
  termios before{};
  if (::isatty(STDIN_FILENO) == 0 || ::isatty(STDOUT_FILENO) == 0 || ::tcgetattr(STDIN_FILENO, &before) != 0)
    return Error{Errc::kIo, "standard input and output are no terminal"};
  const sigset_t watched = watched_signals();
  sigset_t mask;
  ::sigprocmask(SIG_BLOCK, &watched, &mask);
  OwnedFd signals(::signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
  termios raw = before;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
  raw.c_cc[VSUSP] = _POSIX_VDISABLE;  // stopped, it would leave the shell on the other screen
  raw.c_cc[VMIN] = 0;
  raw.c_cc[VTIME] = 0;
  if (!signals.valid() || ::tcsetattr(STDIN_FILENO, TCSANOW, &raw) != 0) {
    const Error error{Errc::kIo, std::string("the terminal: ") + std::strerror(errno)};
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    return error;
  }
  write_all(kEnter);
  return Terminal(std::move(signals), before, mask);
}

Terminal::Terminal(OwnedFd signals, termios before, sigset_t mask)
    : signals_(std::move(signals)), before_(before), mask_(mask) {}

Terminal::~Terminal() {
  if (!signals_.valid()) return;
  write_all(kLeave);
  ::tcsetattr(STDIN_FILENO, TCSAFLUSH, &before_);
  ::sigprocmask(SIG_SETMASK, &mask_, nullptr);
}

ScreenSize Terminal::size() const {
  winsize window{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_col == 0 || window.ws_row == 0) return {};
  return {.columns = window.ws_col, .rows = window.ws_row};
}

void Terminal::show(const std::vector<Line>& lines, Colours colours) const {
  std::string text = "\033[H";
  for (std::size_t i = 0; i < lines.size(); ++i) {
    text += painted(lines[i], colours) + "\033[K";
    if (i + 1 < lines.size()) text += "\r\n";
  }
  write_all(text + "\033[J");
}

Terminal::Event Terminal::wait(std::chrono::milliseconds patience) const {
  pollfd sources[] = {{STDIN_FILENO, POLLIN, 0}, {signals_.get(), POLLIN, 0}};
  if (::poll(sources, 2, static_cast<int>(patience.count())) <= 0) return {};
  signalfd_siginfo arrived{};
  if (sources[1].revents != 0 && ::read(signals_.get(), &arrived, sizeof arrived) == sizeof arrived) {
    const int signal = static_cast<int>(arrived.ssi_signo);
    if (signal == SIGWINCH) return {.kind = Event::Kind::kResized};
    return {.kind = Event::Kind::kSignal, .signal = signal};
  }
  char key = 0;
  if ((sources[0].revents & POLLIN) != 0 && ::read(STDIN_FILENO, &key, 1) == 1)
    return {.kind = Event::Kind::kKey, .key = key};
  if ((sources[0].revents & (POLLHUP | POLLERR)) != 0)
    return {.kind = Event::Kind::kSignal, .signal = SIGHUP};
  return {};
}

Colours wanted_colours() {
  const char* none = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  const bool off =
      (none != nullptr && *none != '\0') || (terminal != nullptr && std::string_view(terminal) == "dumb");
  return off ? Colours::kOff : Colours::kOn;
}

}  // namespace terrace
