#include "examples/moe_trainer/stop_signal.hpp"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <ctime>

namespace terrace::trainer {

namespace {

// One request to stop often comes twice: to the process group, and forwarded by the parent.
constexpr std::int64_t kSameRequestNanoseconds = 1'000'000'000;

volatile std::sig_atomic_t received = 0;
std::int64_t received_at = 0;

std::int64_t monotonic_nanoseconds() {
  const int errno_of_the_interrupted = errno;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // one of the few calls a signal handler may make
  errno = errno_of_the_interrupted;
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void on_signal(int signal) {
  const std::int64_t now = monotonic_nanoseconds();
  if (received != 0) {
    if (now - received_at > kSameRequestNanoseconds) _exit(128 + signal);
    return;
  }
  received = signal;
  received_at = now;
}

}  // namespace

void watch_stop_signals() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // a checkpoint being written is written to its end
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int stop_signal() { return received; }

}  // namespace terrace::trainer
