#include "examples/moe_trainer/stop_signal.hpp"

#include <unistd.h>

#include <csignal>

namespace terrace::trainer {

namespace {

volatile std::sig_atomic_t received = 0;

void on_signal(int signal) {
  if (received != 0) _exit(128 + signal);
  received = signal;
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
